#include "cuda/images.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>

#include "cuda/driver.h"
#include "cuda/nvrtc.h"
#include "per_process.h"

namespace pycollective::cuda {

std::string cache_folder() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/pycollective";
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home == '/') return std::string(home) + "/.cache/pycollective";
  return "";
}

namespace {

// What NVRTC has compiled is kept in the user's cache folder. Images are code: folder and files are
// the user's own, and nobody else can write them, or they are not used.

// Ahead of the image, so that a file that was cut or damaged is seen.
struct Header {
  char magic[8];
  std::uint64_t size;
  std::uint64_t sum;
};
constexpr char kMagic[8] = {'p', 'y', 'c', 'o', 'l', 'l', '0', '1'};

std::uint64_t sum_of(const char* bytes, std::size_t size) {
  std::uint64_t sum = 0xCBF29CE484222325;
  for (std::size_t i = 0; i < size; ++i)
    sum = (sum ^ static_cast<unsigned char>(bytes[i])) * 0x100000001B3;
  return sum;
}

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

bool is_own(const struct stat& found) {
  return found.st_uid == geteuid() && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Moves all of them by read or write, which may move fewer.
template <class Move, class Byte>
bool move_all(Move move, int descriptor, Byte* bytes, std::size_t size) {
  while (size > 0) {
    const ssize_t moved = move(descriptor, bytes, size);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    bytes += moved;
    size -= static_cast<std::size_t>(moved);
  }
  return true;
}

// The folder and those above it, as far as they are not there. mkdir's failure shows in the end.
void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    mkdir(path.substr(0, end).c_str(), S_IRWXU);
    if (end == std::string::npos) return;
  }
}

// Why nothing is kept, in words; "" where the folder is good, or not there yet.
std::string cache_refusal() {
  const std::string folder = cache_folder();
  if (folder.empty()) return "neither XDG_CACHE_HOME nor HOME names a folder";
  struct stat found;
  if (lstat(folder.c_str(), &found) != 0)
    return errno == ENOENT ? "" : folder + ": " + std::strerror(errno);
  if (!S_ISDIR(found.st_mode)) return folder + " is not a folder";
  if (found.st_uid != geteuid())
    return folder + " is user " + std::to_string(found.st_uid) + "'s, not " +
           std::to_string(geteuid()) + "'s";
  if (!is_own(found)) return folder + " can be written by others; chmod 700 it";
  return "";
}

// What was stored under this name, if it is there, the user's own, and whole.
std::optional<Bytes> load_cached(const std::string& name) {
  if (!cache_refusal().empty()) return std::nullopt;
  const std::string path = cache_folder() + "/" + name;
  // A pipe of that name is not waited for.
  const File file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat found;
  if (file.descriptor() < 0 || fstat(file.descriptor(), &found) != 0) return std::nullopt;
  if (!S_ISREG(found.st_mode) || !is_own(found)) return std::nullopt;
  Header header;
  const auto size = static_cast<std::size_t>(found.st_size);
  if (size < sizeof(header) ||
      !move_all(read, file.descriptor(), reinterpret_cast<char*>(&header), sizeof(header)) ||
      std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      header.size != size - sizeof(header))
    return std::nullopt;
  Bytes image(header.size);
  if (!move_all(read, file.descriptor(), image.data(), image.size()) ||
      header.sum != sum_of(image.data(), image.size()))
    return std::nullopt;
  return image;
}

// Whoever reads at the same time sees all of it or nothing. Where it cannot be written, nothing is
// kept: the next program compiles again.
void store_cached(const std::string& name, const Bytes& image) {
  const std::string folder = cache_folder();
  if (folder.empty()) return;
  make_folders(folder);
  if (!cache_refusal().empty()) return;
  const std::string path = folder + "/" + name;
  std::string made = path + ".XXXXXX";
  Header header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.size = image.size();
  header.sum = sum_of(image.data(), image.size());
  bool whole = false;
  {
    const File file(mkostemp(made.data(), O_CLOEXEC));
    if (file.descriptor() < 0) return;
    whole = move_all(write, file.descriptor(), reinterpret_cast<const char*>(&header),
                     sizeof(header)) &&
            move_all(write, file.descriptor(), image.data(), image.size());
  }
  if (!whole || std::rename(made.c_str(), path.c_str()) != 0) unlink(made.c_str());
}

constexpr const char* kVariable = "PYCOLLECTIVE_CUDA_IMAGES";

std::optional<std::string> named_folder() {
  const char* const folder = std::getenv(kVariable);
  if (folder == nullptr || *folder == '\0') return std::nullopt;
  return folder;
}

Bytes read_image(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw std::runtime_error("no CUDA kernels: cannot read " + path + ", in the folder that " +
                             kVariable + " names");
  Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  bytes.push_back('\0');  // PTX is a text
  return bytes;
}

std::string compiled_for() {
  return "compiled by nvcc for " + std::string(embedded().architectures);
}

std::string why_nvcc_made_none() {
  const std::string why = embedded().nvcc_failure;
  return why.empty() ? "" : "; nvcc failed when pycollective was built: " + why;
}

std::string why_none_is_kept() {
  const std::string why = cache_refusal();
  return why.empty() ? "" : "; not kept, as " + why;
}

// Whether the driver refused the image for what it is: of another GPU, of a newer compiler, or PTX
// that this driver cannot or may not compile. All else says nothing of the image.
bool refuses_image(const DriverError& error) {
  for (const CUresult of_the_image :
       {CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_INVALID_PTX,
        CUDA_ERROR_JIT_COMPILER_NOT_FOUND, CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        CUDA_ERROR_JIT_COMPILATION_DISABLED})
    if (error.result() == of_the_image) return true;
  return false;
}

// What NVRTC is to make of a module.
struct Wanted {
  Wanted(const EmbeddedModule& module, const GpuTraits& gpu,
         const std::vector<std::string>& nvrtc_folders)
      : compiler(nvrtc_folders, gpu.driver_version),
        architecture(compiler.architecture(gpu.major, gpu.minor)),
        name(std::string(module.name) + "-" + architecture + "-" +
             digest_of(module, compiler, architecture)),
        origin("NVRTC " + compiler.version() + " for " + architecture) {}
  Nvrtc compiler;
  std::string architecture;
  std::string name;
  std::string origin;
};

struct Prepared {
  Bytes image;
  std::string origin;
  std::string failure;  // in place of an image
};
// What prepare_images() has made.
struct AllPrepared {
  std::mutex mutex;
  std::map<std::string, Prepared> by_name;
};
PerProcess<AllPrepared> prepared_here;

// Under the lock: whoever needs what is being made waits for it.
Prepared prepare(const EmbeddedModule& module, const Wanted& wanted) {
  if (auto cached = load_cached(wanted.name))
    return {std::move(*cached), wanted.origin + ", from " + cache_folder(), ""};
  try {
    Bytes made = wanted.compiler.compile(module, wanted.architecture);
    store_cached(wanted.name, made);
    return {std::move(made), wanted.origin + why_none_is_kept(), ""};
  } catch (const std::runtime_error& error) {
    return {{}, "", error.what()};
  }
}

std::optional<Prepared> find_prepared(const std::string& name) {
  const std::lock_guard lock(prepared_here->mutex);
  auto& all = prepared_here->by_name;
  const auto found = all.find(name);
  if (found == all.end()) return std::nullopt;
  const Prepared prepared = found->second;
  if (prepared.failure.empty()) return prepared;
  all.erase(found);  // who asks again has mended it
  throw std::runtime_error(prepared.failure);
}

}  // namespace

void prepare_images(const GpuTraits& gpu, const std::vector<std::string>& nvrtc_folders) {
  if (named_folder()) return;
  const EmbeddedModule& program = embedded().program;
  if (program.image != nullptr) return;
  const Wanted wanted(program, gpu, nvrtc_folders);
  const std::lock_guard lock(prepared_here->mutex);
  auto& all = prepared_here->by_name;
  if (all.count(wanted.name) == 0) all.emplace(wanted.name, prepare(program, wanted));
}

std::string load_image(const EmbeddedModule& module, const GpuTraits& gpu,
                       const std::vector<std::string>& nvrtc_folders,
                       const std::function<void(const void* image)>& load) {
  if (const auto folder = named_folder()) {
    const std::string path = *folder + "/" + module.name + ".fatbin";
    load(read_image(path).data());
    return path;
  }
  std::string refused = why_nvcc_made_none();
  if (module.image != nullptr) {
    try {
      load(module.image);
      return compiled_for();
    } catch (const DriverError& error) {
      if (!refuses_image(error)) throw;
      refused = "; the driver refused those of nvcc: " + std::string(error.what());
    }
  }
  try {
    const Wanted wanted(module, gpu, nvrtc_folders);
    if (const auto prepared = find_prepared(wanted.name)) {
      load(prepared->image.data());
      return prepared->origin;
    }
    if (const auto cached = load_cached(wanted.name)) {
      load(cached->data());
      return wanted.origin + ", from " + cache_folder();
    }
    const Bytes made = wanted.compiler.compile(module, wanted.architecture);
    load(made.data());
    store_cached(wanted.name, made);
    return wanted.origin + why_none_is_kept();
  } catch (const DriverError& error) {
    if (!refuses_image(error)) throw;
    throw DriverError(error.result(), error.what() + refused);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + refused);
  }
}

std::string describe_images(int driver_version, const std::vector<std::string>& nvrtc_folders) {
  if (const auto folder = named_folder()) return *folder;
  if (*embedded().architectures != '\0') return compiled_for();
  try {
    const Nvrtc compiler(nvrtc_folders, driver_version);
    return "NVRTC " + compiler.version() + " when first needed (" + compiler.library() + ")" +
           why_none_is_kept() + why_nvcc_made_none();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(error.what() + why_nvcc_made_none());
  }
}

}  // namespace pycollective::cuda
