// What NVRTC makes of the kernels, as tests in Python read it (tests/cuda/test_generated_code.py):
//
//   nvrtc_images OUT MAJOR MINOR [FOLDER ...] -- [FLAG ...]
//
// writes OUT/<module> for a GPU of this compute capability. FOLDER: where NVRTC may be, beside the
// usual places; FLAG: beside the usual ones. Where there is no NVRTC, or it warns, that is said on
// stderr, and the exit status is 1.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/embedded.h"
#include "cuda/nvrtc.h"
#include "tests/check.h"

int main(int count, char** arguments) {
  using namespace pycollective::cuda;
  constexpr int kAnyDriver = 1 << 30;
  CHECK(count > 4);
  std::vector<std::string> folders, flags;
  bool flags_follow = false;
  for (int i = 4; i < count; ++i) {
    const std::string argument = arguments[i];
    if (!flags_follow && argument == "--")
      flags_follow = true;
    else
      (flags_follow ? flags : folders).push_back(argument);
  }
  try {
    const Nvrtc compiler(folders, kAnyDriver);
    const std::string architecture =
        compiler.architecture(std::atoi(arguments[2]), std::atoi(arguments[3]));
    for (const EmbeddedModule& module : embedded().modules) {
      const Bytes image = compiler.compile(module, architecture, flags);
      std::ofstream file(std::string(arguments[1]) + "/" + module.name, std::ios::binary);
      file.write(image.data(), static_cast<std::streamsize>(image.size()));
      file.close();
      CHECK(file);
    }
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
