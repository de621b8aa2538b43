// The fake NVRTC beside a test, and a folder for what it makes.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/check.h"

namespace pycollective::cuda {

namespace fs = std::filesystem;

inline void set(const char* name, const std::string& value) {
  CHECK(setenv(name, value.c_str(), 1) == 0);
}

// A folder for this program's files, gone at the end; and the environment that each test begins in.
struct Folder {
  explicit Folder(const std::string& fake) {
    std::string name = fs::temp_directory_path() / "cuda-images-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path = name;
    set("XDG_CACHE_HOME", path);
    set("PYCOLLECTIVE_NVRTC", fake);
    for (const char* const variable :
         {"PYCOLLECTIVE_CUDA_IMAGES", "FAKE_NVRTC_MAJOR", "FAKE_NVRTC_LOG"})
      unsetenv(variable);
  }
  ~Folder() { fs::remove_all(path); }
  fs::path cached() const {
    for (const auto& entry : fs::directory_iterator(path / "pycollective")) return entry.path();
    return {};
  }
  fs::path path;
};

inline int compilations(const std::string& fake) {
  void* const library = dlopen(fake.c_str(), RTLD_NOW);
  CHECK(library != nullptr);
  return reinterpret_cast<int (*)()>(dlsym(library, "fake_nvrtc_compilations"))();
}

}  // namespace pycollective::cuda
