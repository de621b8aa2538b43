// The kernels, as they are in this library: sources and flags, for NVRTC, and images that nvcc made
// when it was built, if it did. embed.py writes the other half.
#pragma once

#include <cstddef>

namespace pycollective::cuda {

template <class T>
struct Span {
  const T* first;
  std::size_t count;
  template <std::size_t N>
  constexpr Span(const T (&array)[N]) : first(array), count(N) {}
  constexpr const T* begin() const { return first; }
  constexpr const T* end() const { return first + count; }
};

struct EmbeddedSource {
  const char* name;  // as it is included
  const char* text;
};

struct EmbeddedModule {
  const char* name;
  const char* source;  // the name of its file
  const unsigned char* image;
  const unsigned char* image_end;  // both null: nvcc was not there
};

struct Embedded {
  Span<EmbeddedSource> sources;
  EmbeddedModule program;
  Span<const char*> flags;
  const char* architectures;  // of the images, in words; "": there are none
  const char* nvcc_failure;   // why nvcc made none, in a line; "": it did, or was not to
};

const Embedded& embedded();

}  // namespace pycollective::cuda
