// Where a module's image comes from: the order, the cache, and what is said where there is none.
// NVRTC is the fake one beside this program; there is no driver.

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "cuda/driver.h"
#include "cuda/images.h"
#include "tests/check.h"
#include "tests/fake_nvrtc.h"

namespace pycollective::cuda {
namespace {

constexpr GpuTraits kHopper{9, 0, 13000};

// {from where, image}
struct Loaded {
  std::string origin, image;
};
Loaded load(const GpuTraits& gpu = kHopper, const EmbeddedModule& module = embedded().program) {
  Loaded loaded;
  // Those of the fake are texts that end with the last header's name and a blank.
  loaded.origin = load_image(module, gpu, {}, [&](const void* image) {
    const auto* const text = static_cast<const char*>(image);
    const auto* const end = std::strstr(text, "numerics.h ");
    loaded.image = end == nullptr ? std::string(text, 6) : std::string(text, end + 10);
  });
  return loaded;
}

std::string refusal(const GpuTraits& gpu = kHopper) {
  try {
    load(gpu);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void test_what_is_compiled_is_kept(const std::string& fake) {
  const Folder folder(fake);
  const int before = compilations(fake);
  const Loaded first = load();
  CHECK(first.origin == "NVRTC 13.0 for sm_90");
  CHECK(holds(first.image, "cubin cuda/program.cu, "));
  for (const char* const part : {" -arch=sm_90 ", " -fmad=false ", " -ftz=false", " cstdint ",
                                 " cuda/device.h ", " cuda/reduce.h ", " numerics.h"})
    CHECK(holds(first.image, part));
  const Loaded second = load();
  CHECK(second.image == first.image);
  CHECK(holds(second.origin, "NVRTC 13.0 for sm_90, from " + folder.path.string()));
  CHECK(compilations(fake) == before + 1);
  CHECK(load({8, 6, 13000}).origin == "NVRTC 13.0 for sm_80");  // another name
  CHECK(compilations(fake) == before + 2);
}

// Whatever a byte of the file became, and wherever it was cut.
void test_a_damaged_file_is_made_again(const std::string& fake) {
  const Folder folder(fake);
  const Loaded whole = load();
  const fs::path file = folder.cached();
  std::ifstream stream(file, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  for (std::size_t at = 0; at < bytes.size(); at += at < 40 ? 1 : 97)
    for (const bool cut : {false, true}) {
      std::string damaged = cut ? bytes.substr(0, at) : bytes;
      if (!cut) damaged[at] = static_cast<char>(damaged[at] ^ 1);
      std::ofstream(file, std::ios::binary | std::ios::trunc) << damaged;
      const int before = compilations(fake);
      CHECK(load().image == whole.image);
      CHECK(compilations(fake) == before + 1);
    }
  for (const auto& entry : fs::directory_iterator(folder.path / "pycollective"))
    CHECK(entry.path() == file);  // nothing half made is left
}

void test_a_cache_that_cannot_be_written_is_done_without(const std::string& fake) {
  const Folder folder(fake);
  std::ofstream(folder.path / "pycollective") << "a file, not a folder";
  CHECK(holds(load().image, "cubin"));
  unsetenv("XDG_CACHE_HOME");
  const std::string home = std::getenv("HOME") != nullptr ? std::getenv("HOME") : "";
  unsetenv("HOME");
  CHECK(cache_folder().empty());
  CHECK(holds(load().image, "cubin"));
  set("HOME", home);
}

void test_folder_and_files_are_the_users_alone(const std::string& fake) {
  const Folder folder(fake);
  set("XDG_CACHE_HOME", folder.path / "made" / "too");
  const mode_t mask = umask(0);
  load();
  umask(mask);
  const fs::path made = cache_folder();
  CHECK(fs::status(made).permissions() == fs::perms::owner_all);
  for (const auto& entry : fs::directory_iterator(made))
    CHECK(entry.status().permissions() == (fs::perms::owner_read | fs::perms::owner_write));
}

// Whether a load compiles, beside what it gives.
bool compiles(const std::string& fake, const std::string& image) {
  const int before = compilations(fake);
  CHECK(load().image == image);
  return compilations(fake) != before;
}

void test_a_file_that_others_could_have_written_is_not_used(const std::string& fake) {
  const Folder folder(fake);
  const std::string image = load().image;
  const fs::path file = folder.cached();
  const fs::path elsewhere = folder.path / "elsewhere";
  const std::function<void()> spoil[] = {
      [&] { CHECK(chmod(file.c_str(), 0620) == 0); },
      [&] { CHECK(chmod(file.c_str(), 0602) == 0); },
      [&] {
        fs::rename(file, elsewhere);
        fs::create_symlink(elsewhere, file);
      },
      [&] {  // a pipe that nobody writes
        fs::remove(file);
        CHECK(mkfifo(file.c_str(), 0600) == 0);
      },
      [&] { CHECK(chown(file.c_str(), 65534, -1) == 0); },
  };
  for (const auto& each : spoil) {
    if (&each == std::end(spoil) - 1 && geteuid() != 0) continue;  // root alone gives files away
    CHECK(!compiles(fake, image));
    each();
    CHECK(compiles(fake, image));
    CHECK(!compiles(fake, image));  // a good one is there instead
  }
}

void test_a_folder_that_others_can_write_is_not_used(const std::string& fake) {
  const Folder folder(fake);
  const std::string image = load().image;
  const fs::path cache = cache_folder();
  const fs::path elsewhere = folder.path / "elsewhere";
  struct Spoil {
    std::function<void()> begin, end;
    const char* said;
  };
  const Spoil spoil[] = {
      {[&] { CHECK(chmod(cache.c_str(), 0770) == 0); },
       [&] { CHECK(chmod(cache.c_str(), 0700) == 0); }, " can be written by others; chmod 700 it"},
      {[&] { CHECK(chmod(cache.c_str(), 01777) == 0); },
       [&] { CHECK(chmod(cache.c_str(), 0755) == 0); }, " can be written by others; chmod 700 it"},
      {[&] {
         fs::rename(cache, elsewhere);
         fs::create_symlink(elsewhere, cache);
       },
       [&] {
         fs::remove(cache);
         fs::rename(elsewhere, cache);
       },
       " is not a folder"},
      {[&] { CHECK(chown(cache.c_str(), 65534, -1) == 0); },
       [&] { CHECK(chown(cache.c_str(), 0, -1) == 0); }, " is user 65534's, not 0's"},
  };
  for (const Spoil& each : spoil) {
    if (&each == std::end(spoil) - 1 && geteuid() != 0) continue;
    CHECK(!compiles(fake, image));
    each.begin();
    const int before = compilations(fake);
    const std::string said = "; not kept, as " + cache.string() + each.said;
    CHECK(load().origin == "NVRTC 13.0 for sm_90" + said);
    CHECK(load({8, 6, 13000}).origin == "NVRTC 13.0 for sm_80" + said);
    CHECK(compilations(fake) == before + 2);
    CHECK(holds(describe_images(13000, {}), said));
    each.end();
    CHECK(std::distance(fs::directory_iterator(cache), {}) == 1);  // nothing was added
  }
}

// A new file is written under a name that nobody could have put a link under.
void test_no_link_is_written_through(const std::string& fake) {
  const Folder folder(fake);
  load();
  const fs::path file = folder.cached(), victim = folder.path / "victim";
  std::ofstream(victim) << "a victim";
  fs::remove(file);
  for (int i = 0; i < 1000; ++i)
    fs::create_symlink(victim,
                       file.string() + "." + std::to_string(getpid()) + "." + std::to_string(i));
  load();
  CHECK(fs::file_size(victim) == std::strlen("a victim"));
}

// What was made before is taken where it is needed, whether or not a file keeps it; what could not
// be made is told there, once.
void test_what_is_prepared_is_not_made_again(const std::string& fake) {
  const Folder folder(fake);
  std::ofstream(folder.path / "pycollective") << "a file, not a folder";
  constexpr GpuTraits kBlackwell{10, 0, 13000};
  const int before = compilations(fake);
  prepare_images(kBlackwell, {});
  prepare_images({10, 3, 13000}, {});  // the same name
  CHECK(compilations(fake) == before + 1);
  for (int gpu = 0; gpu < 2; ++gpu) CHECK(holds(load(kBlackwell).image, "cubin cuda/program"));
  CHECK(compilations(fake) == before + 1);
  set("FAKE_NVRTC_LOG", "error");
  prepare_images({8, 0, 13000}, {});
  CHECK(compilations(fake) == before + 2);
  CHECK(holds(refusal({8, 0, 13000}), "does not compile cuda/program.cu for sm_80"));
  CHECK(compilations(fake) == before + 2);
  unsetenv("FAKE_NVRTC_LOG");
  CHECK(holds(load({8, 0, 13000}).image, "cubin"));
  CHECK(compilations(fake) == before + 3);
  set("PYCOLLECTIVE_CUDA_IMAGES", folder.path);  // nothing else is taken then
  prepare_images({9, 0, 13000}, {});
  CHECK(compilations(fake) == before + 3);
}

void test_a_disk_that_is_full_costs_the_file_alone(const std::string& fake) {
  const Folder folder(fake);
  rlimit unlimited;
  CHECK(getrlimit(RLIMIT_FSIZE, &unlimited) == 0);
  const rlimit small = {100, unlimited.rlim_max};
  CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const Loaded loaded = load();
  CHECK(setrlimit(RLIMIT_FSIZE, &unlimited) == 0);
  CHECK(holds(loaded.image, "cubin"));
  CHECK(folder.cached().empty());
}

void test_a_later_gpu_gets_ptx_and_an_earlier_one_nothing(const std::string& fake) {
  const Folder folder(fake);
  CHECK(load({10, 3, 13000}).origin == "NVRTC 13.0 for sm_100");
  const Loaded later = load({12, 0, 13000});
  CHECK(later.origin == "NVRTC 13.0 for compute_100");
  CHECK(holds(later.image, "ptx "));
  CHECK(holds(refusal({7, 0, 13000}), "compiles nothing for a GPU of compute capability 7.0"));
}

void test_who_has_no_compiler_is_told_what_to_install(const std::string& fake) {
  const Folder folder(fake);
  CHECK(holds(refusal({9, 0, 12040}),
              "is NVRTC 13.0, newer than the driver; install NVRTC (pip "
              "install nvidia-cuda-nvrtc-cu12)"));
  set("PYCOLLECTIVE_NVRTC", "/no/such/libnvrtc.so");
  CHECK(holds(refusal(),
              "no NVRTC to compile CUDA kernels with: PYCOLLECTIVE_NVRTC: /no/such/libnvrtc.so: "
              "cannot open shared object file: No such file or directory; install NVRTC (pip "
              "install 'nvidia-cuda-nvrtc>=13,<14'), or build pycollective where nvcc is"));
  set("PYCOLLECTIVE_NVRTC", "libm.so.6");
  CHECK(holds(refusal(), "libm.so.6 is no NVRTC of 12 or later: it has no nvrtcVersion; install"));
}

void test_an_error_is_told(const std::string& fake) {
  const Folder folder(fake);
  set("FAKE_NVRTC_LOG", "error");
  CHECK(holds(refusal(), "does not compile cuda/program.cu for sm_90"));
  CHECK(holds(refusal(), "FAKE_ERROR\nerror"));
  CHECK(!fs::exists(folder.path / "pycollective"));
}

// As NVRTC 12 has of every program for a V100.
void test_a_warning_is_no_error(const std::string& fake) {
  const Folder folder(fake);
  set("FAKE_NVRTC_LOG", "Architectures prior to '<compute/sm>_75' are deprecated");
  CHECK(load().origin == "NVRTC 13.0 for sm_90");
  CHECK(fs::exists(folder.cached()));
}

void test_the_order(const std::string& fake) {
  const Folder folder(fake);
  // What nvcc made comes first;
  static const unsigned char own[] = "by nvcc";
  EmbeddedModule module = embedded().program;
  module.image = own;
  module.image_end = own + sizeof(own);
  CHECK(load(kHopper, module).image == "by nvc");
  // where the driver refuses it, NVRTC's;
  std::string taken;
  load_image(module, kHopper, {}, [&](const void* image) {
    if (image == own) throw DriverError(CUDA_ERROR_NO_BINARY_FOR_GPU, "refused by a test");
    taken.assign(static_cast<const char*>(image), 6);
  });
  CHECK(taken == "cubin ");
  // and where there is none, both are told.
  set("PYCOLLECTIVE_NVRTC", "/no/such/libnvrtc.so");
  try {
    load_image(module, kHopper, {}, [&](const void*) {
      throw DriverError(CUDA_ERROR_NO_BINARY_FOR_GPU, "refused by a test");
    });
    CHECK(false);
  } catch (const std::runtime_error& error) {
    CHECK(holds(error.what(), "no NVRTC"));
    CHECK(holds(error.what(), "the driver refused those of nvcc: refused by a test"));
  }
  // A named folder is before all of them, and nothing is instead of it.
  set("PYCOLLECTIVE_CUDA_IMAGES", folder.path);
  CHECK(holds(refusal(), "cannot read " + (folder.path / "program.fatbin").string()));
  std::ofstream(folder.path / "program.fatbin") << "by hand";
  CHECK(load(kHopper, module).image == "by han");
  CHECK(describe_images(13000, {}) == folder.path);
}

// What the driver says of other things than the image is raised as it is, and no other is tried.
void test_a_failure_that_is_not_the_images_is_raised(const std::string& fake) {
  const Folder folder(fake);
  static const unsigned char own[] = "by nvcc";
  const EmbeddedModule& sources = embedded().program;
  EmbeddedModule changed = sources;
  changed.image = own;
  changed.image_end = own + sizeof(own);
  const EmbeddedModule& by_nvcc = changed;
  // Of the first image, of the only one, and of the second.
  for (const auto& [module, fails_at] :
       {std::pair(&by_nvcc, 1), std::pair(&sources, 1), std::pair(&by_nvcc, 2)})
    for (const CUresult result : {CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_CONTEXT,
                                  CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_LAUNCH_FAILED}) {
      int tried = 0;
      try {
        load_image(*module, kHopper, {}, [&, at = fails_at](const void*) {
          throw DriverError(++tried < at ? CUDA_ERROR_NO_BINARY_FOR_GPU : result, "a test's");
        });
        CHECK(false);
      } catch (const DriverError& error) {
        CHECK(error.result() == result);
        CHECK(error.what() == std::string("a test's"));
      }
      CHECK(tried == fails_at);
    }
  for (const CUresult result :
       {CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_JIT_COMPILATION_DISABLED}) {
    int tried = 0;
    try {
      load_image(by_nvcc, kHopper, {}, [&](const void*) {
        throw DriverError(result, "refusal " + std::to_string(++tried));
      });
      CHECK(false);
    } catch (const DriverError& error) {
      CHECK(error.result() == result);
      CHECK(holds(error.what(), "refusal 2; the driver refused those of nvcc: refusal 1"));
    }
  }
}

}  // namespace
}  // namespace pycollective::cuda

int main(int, char** arguments) {
  using namespace pycollective::cuda;
  const std::string fake =
      std::filesystem::absolute(arguments[0]).parent_path() / "libfake_nvrtc.so";
  test_what_is_compiled_is_kept(fake);
  test_a_damaged_file_is_made_again(fake);
  test_a_cache_that_cannot_be_written_is_done_without(fake);
  test_folder_and_files_are_the_users_alone(fake);
  test_a_file_that_others_could_have_written_is_not_used(fake);
  test_a_folder_that_others_can_write_is_not_used(fake);
  test_no_link_is_written_through(fake);
  test_a_disk_that_is_full_costs_the_file_alone(fake);
  test_a_later_gpu_gets_ptx_and_an_earlier_one_nothing(fake);
  test_who_has_no_compiler_is_told_what_to_install(fake);
  test_an_error_is_told(fake);
  test_a_warning_is_no_error(fake);
  test_the_order(fake);
  test_a_failure_that_is_not_the_images_is_raised(fake);
  test_what_is_prepared_is_not_made_again(fake);  // last: it is kept in the process
  return 0;
}
