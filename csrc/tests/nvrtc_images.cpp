// What NVRTC makes of the kernels, as tests in Python read it (tests/cuda/test_generated_code.py):
//
//   nvrtc_images OUT MAJOR MINOR [FOLDER ...]
//
// writes OUT/program for a GPU of this compute capability. FOLDER: where NVRTC may be, beside the
// usual places. Where there is no NVRTC, that is said on stderr, and the exit status is 1.

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
  CHECK(count > 3);
  const std::vector<std::string> folders(arguments + 4, arguments + count);
  try {
    const Nvrtc compiler(folders, kAnyDriver);
    const std::string architecture =
        compiler.architecture(std::atoi(arguments[2]), std::atoi(arguments[3]));
    const Bytes image = compiler.compile(embedded().program, architecture);
    std::ofstream file(std::string(arguments[1]) + "/program", std::ios::binary);
    file.write(image.data(), static_cast<std::streamsize>(image.size()));
    file.close();
    CHECK(file);
  } catch (const std::runtime_error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
