// An NVRTC for tests: a shared library that compiles nothing, says what it was asked, and fails as
// the environment says.
//   FAKE_NVRTC_MAJOR   its version (13)       FAKE_NVRTC_LOG   what it has to say of a program
//   FAKE_NVRTC_PREFIX  what an image begins with ("cubin ")
//   FAKE_NVRTC_COMPILED   a file to which it adds a line for each program

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

namespace {

struct Program {
  std::string headers, image, log;
};

int compilations = 0;

const char* setting(const char* name, const char* otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : value;
}

Program* of(void* handle) { return static_cast<Program*>(handle); }

std::string prefix() { return setting("FAKE_NVRTC_PREFIX", "cubin "); }

int copy(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return 0;
}

}  // namespace

extern "C" {
int fake_nvrtc_compilations() { return compilations; }

int nvrtcVersion(int* major, int* minor) {
  *major = std::atoi(setting("FAKE_NVRTC_MAJOR", "13"));
  *minor = 0;
  return 0;
}
const char* nvrtcGetErrorString(int result) { return result == 0 ? "NONE" : "FAKE_ERROR"; }
int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
int nvrtcGetSupportedArchs(int* all) {
  all[0] = 80;
  all[1] = 90;
  all[2] = 100;
  return 0;
}
int nvrtcCreateProgram(void** out, const char* source, const char* name, int count,
                       const char* const* headers, const char* const* names) {
  auto* const program = new Program;
  for (int i = 0; i < count; ++i)
    if (std::strlen(headers[i]) > 0) program->headers += std::string(names[i]) + " ";
  program->image = std::string(name) + ", " + std::to_string(std::strlen(source)) + " bytes;";
  *out = program;
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete of(*program);
  *program = nullptr;
  return 0;
}
int nvrtcCompileProgram(void* handle, int count, const char* const* flags) {
  ++compilations;
  if (const char* const file = std::getenv("FAKE_NVRTC_COMPILED"))
    std::ofstream(file, std::ios::app) << of(handle)->image << std::endl;
  for (int i = 0; i < count; ++i) of(handle)->image += std::string(" ") + flags[i];
  of(handle)->image += "; " + of(handle)->headers;
  of(handle)->log = setting("FAKE_NVRTC_LOG", "");
  return of(handle)->log == "error" ? 6 : 0;
}
int nvrtcGetProgramLogSize(void* handle, std::size_t* size) {
  *size = of(handle)->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(void* handle, char* to) {
  return copy(of(handle)->log + std::string(1, '\0'), to);
}
int nvrtcGetCUBINSize(void* handle, std::size_t* size) {
  *size = prefix().size() + of(handle)->image.size();
  return 0;
}
int nvrtcGetCUBIN(void* handle, char* to) { return copy(prefix() + of(handle)->image, to); }
int nvrtcGetPTXSize(void* handle, std::size_t* size) {
  *size = 4 + of(handle)->image.size();
  return 0;
}
int nvrtcGetPTX(void* handle, char* to) { return copy("ptx " + of(handle)->image, to); }
}
