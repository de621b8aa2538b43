// The stand-in's own declarations against <cuda.h>, where that is installed: a function declared
// otherwise than there does not compile, nor a number that differs.
#if __has_include(<cuda.h>)
#include <cuda.h>

#include "exports.h"

#define COMPARE(name, value, ...) \
  static_assert(static_cast<int>(name) == (value), #name " is another number in cuda.h");
STANDIN_ERRORS(COMPARE)
STANDIN_DEVICE_ATTRIBUTES(COMPARE)
STANDIN_FUNCTION_ATTRIBUTES(COMPARE)
STANDIN_POINTER_ATTRIBUTES(COMPARE)
STANDIN_FLAGS(COMPARE)
STANDIN_QUERY_RESULTS(COMPARE)
STANDIN_CAPTURE_STATUS(COMPARE)
STANDIN_CAPTURE_MODES(COMPARE)

// A base name stands in cuda.h for the newest of its functions.
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
constexpr bool same(const char* one, const char* other) {
  return *one == *other && (*one == 0 || same(one + 1, other + 1));
}
#define NEWEST(base, since, exported) \
  static_assert(same(TEXT(base), #exported), #base " is another function in cuda.h");
STANDIN_FUNCTIONS(NEWEST)
#endif

#include <cstdio>

int main() {
#if defined(CUDA_VERSION)
  std::printf("compared with <cuda.h> %d\n", CUDA_VERSION);
#else
  std::printf("no <cuda.h> here: nothing was compared\n");
#endif
}
