// Elements in kernels: how they are read, written and copied, 16 bytes or one at a time, and how
// each type gets to its accumulator and back. numerics.h rounds, and knows each type's one NaN.
#pragma once

#include "cuda/device.h"
#include "numerics.h"

namespace pycollective::cuda {

// As many elements as are computed together by one thread.
template <class T, int N>
struct Lanes {
  T at[N];
};

constexpr int kVectorBytes = 16;
template <class T>
constexpr int kVectorLanes = kVectorBytes / static_cast<int>(sizeof(T));

// `from` and `to` are multiples of 16.
template <class T>
DEVICE Lanes<T, kVectorLanes<T>> load_vector(const void* from) {
#if defined(__CUDACC__)
  return bits_as<Lanes<T, kVectorLanes<T>>>(*static_cast<const uint4*>(from));
#else
  Lanes<T, kVectorLanes<T>> value;
  __builtin_memcpy(&value, __builtin_assume_aligned(from, kVectorBytes), kVectorBytes);
  return value;
#endif
}

template <class T>
DEVICE void store_vector(void* to, Lanes<T, kVectorLanes<T>> value) {
#if defined(__CUDACC__)
  *static_cast<uint4*>(to) = bits_as<uint4>(value);
#else
  __builtin_memcpy(__builtin_assume_aligned(to, kVectorBytes), &value, kVectorBytes);
#endif
}

DEVICE std::uint64_t address_of(const void* pointer) {
  return reinterpret_cast<std::uint64_t>(pointer);
}

// Of any alignment: a GPU accesses whole elements only where they are aligned, else byte by byte,
// in a loop, because that is rare.
template <class T>
DEVICE Lanes<T, 1> load_element(const void* from) {
#if defined(__CUDACC__)
  if (address_of(from) % sizeof(T) == 0) return {*static_cast<const T*>(from)};
  unsigned long long bits = 0;
#pragma unroll 1
  for (unsigned i = 0; i < sizeof(T); ++i)
    bits |= static_cast<unsigned long long>(static_cast<const unsigned char*>(from)[i]) << 8 * i;
#else
  std::uint64_t bits = 0;
  __builtin_memcpy(&bits, from, sizeof(T));
#endif
  Lanes<T, 1> value;
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <class T>
DEVICE void store_element(void* to, Lanes<T, 1> value) {
#if defined(__CUDACC__)
  if (address_of(to) % sizeof(T) == 0) {
    *static_cast<T*>(to) = value.at[0];
    return;
  }
  unsigned long long bits = 0;
  memcpy(&bits, &value, sizeof(T));
#pragma unroll 1
  for (unsigned i = 0; i < sizeof(T); ++i)
    static_cast<unsigned char*>(to)[i] = static_cast<unsigned char>(bits >> 8 * i);
#else
  __builtin_memcpy(to, &value, sizeof(T));
#endif
}

// Part of a vector, 4 or 8 bytes: of elements whose accumulators take a whole one, or two.
// Multiples of that.
#if defined(__CUDACC__)
template <int kBytes>
struct Part {
  using Words = uint2;
};
template <>
struct Part<4> {
  using Words = unsigned;
};
#endif

template <class T, int N>
DEVICE Lanes<T, N> load_part(const void* from) {
#if defined(__CUDACC__)
  return bits_as<Lanes<T, N>>(*static_cast<const typename Part<N * sizeof(T)>::Words*>(from));
#else
  Lanes<T, N> value;
  __builtin_memcpy(&value, __builtin_assume_aligned(from, N * sizeof(T)), N * sizeof(T));
  return value;
#endif
}

template <class T, int N>
DEVICE void store_part(void* to, Lanes<T, N> value) {
#if defined(__CUDACC__)
  using Words = typename Part<N * sizeof(T)>::Words;
  *static_cast<Words*>(to) = bits_as<Words>(value);
#else
  __builtin_memcpy(__builtin_assume_aligned(to, N * sizeof(T)), &value, N * sizeof(T));
#endif
}

// Either of them, by the number of lanes.
template <class T, int N>
DEVICE Lanes<T, N> load(const void* from) {
  if constexpr (N == 1)
    return load_element<T>(from);
  else if constexpr (N * sizeof(T) == kVectorBytes)
    return load_vector<T>(from);
  else
    return load_part<T, N>(from);
}

template <class T, int N>
DEVICE void store(void* to, Lanes<T, N> value) {
  if constexpr (N == 1)
    store_element<T>(to, value);
  else if constexpr (N * sizeof(T) == kVectorBytes)
    store_vector<T>(to, value);
  else
    store_part<T, N>(to, value);
}

// Which of all threads this is; each takes every `stride`-th of what there is to do.
struct Share {
  std::uint64_t index, stride;
};

// A T where it is aligned.
template <class T>
DEVICE void copy_one(char* to, const char* from) {
#if defined(__CUDACC__)
  *reinterpret_cast<T*>(to) = *reinterpret_cast<const T*>(from);
#else
  __builtin_memcpy(to, from, sizeof(T));
#endif
}

// `count` vectors.
DEVICE void copy_vectors(char* to, const char* from, std::uint64_t count, Share share) {
  using T = std::uint32_t;
  constexpr int kTogether = 8;  // loads on their way
  std::uint64_t i = share.index;
  for (; i + (kTogether - 1) * share.stride < count; i += kTogether * share.stride) {
    Lanes<T, kVectorLanes<T>> loaded[kTogether];
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      loaded[k] = load_vector<T>(from + (i + k * share.stride) * kVectorBytes);
    UNROLL
    for (int k = 0; k < kTogether; ++k)
      store_vector<T>(to + (i + k * share.stride) * kVectorBytes, loaded[k]);
  }
  for (; i < count; i += share.stride)
    store_vector<T>(to + i * kVectorBytes, load_vector<T>(from + i * kVectorBytes));
}

// All but the vectors, which lie behind `before` bytes; T divides all of these numbers.
template <class T>
DEVICE void copy_rest(char* to, const char* from, std::uint64_t bytes, std::uint64_t before,
                      std::uint64_t in_vectors, Share share) {
  for (std::uint64_t i = share.index; i < (bytes - in_vectors) / sizeof(T); i += share.stride) {
    const std::uint64_t at = i * sizeof(T) + (i * sizeof(T) < before ? 0 : in_vectors);
    copy_one<T>(to + at, from + at);
  }
}

// `from` may be `to`; otherwise they do not overlap.
DEVICE void copy(char* to, const char* from, std::uint64_t bytes, Share share) {
  if (to == from) return;
  std::uint64_t before = bytes, in_vectors = 0;
  if ((address_of(to) ^ address_of(from)) % kVectorBytes == 0) {
    before = (kVectorBytes - address_of(to) % kVectorBytes) % kVectorBytes;
    if (before > bytes) before = bytes;
    in_vectors = (bytes - before) / kVectorBytes * kVectorBytes;
    copy_vectors(to + before, from + before, in_vectors / kVectorBytes, share);
  }
  const std::uint64_t aligned = address_of(to) | address_of(from) | bytes;
  if (aligned % 4 == 0) return copy_rest<std::uint32_t>(to, from, bytes, before, in_vectors, share);
  if (aligned % 2 == 0) return copy_rest<std::uint16_t>(to, from, bytes, before, in_vectors, share);
  copy_rest<std::uint8_t>(to, from, bytes, before, in_vectors, share);
}

// The integers of so many bytes.
template <std::size_t kBytes>
struct Integer;
template <>
struct Integer<1> {
  using Signed = std::int8_t;
  using Unsigned = std::uint8_t;
};
template <>
struct Integer<2> {
  using Signed = std::int16_t;
  using Unsigned = std::uint16_t;
};
template <>
struct Integer<4> {
  using Signed = std::int32_t;
  using Unsigned = std::uint32_t;
};
template <>
struct Integer<8> {
  using Signed = std::int64_t;
  using Unsigned = std::uint64_t;
};

// A number that is computed in its own type, and stored as it is.
template <class T>
struct Plain {
  using Stored = T;
  using Accumulator = T;
  DEVICE T widen(T value) { return value; }
  DEVICE T narrow(T value) { return value; }
};

// As many elements as one thread computes at a time: a vector of them, or as many as a vector of
// accumulators holds, if that is no more than a quarter; two would spill averages on sm_100.
template <class Codec>
constexpr int kStepLanes =
    kVectorLanes<typename Codec::Stored> < 4 * kVectorLanes<typename Codec::Accumulator>
        ? kVectorLanes<typename Codec::Stored>
        : kVectorLanes<typename Codec::Accumulator>;
template <class Codec>
constexpr std::uint64_t kStepBytes = kStepLanes<Codec> * sizeof(typename Codec::Stored);

// How each type gets into and out of its accumulator.
template <Dtype kType, Numbers kNumbers = traits_of(kType).numbers>
struct CodecOf;

// Narrow floats.
template <Dtype kType>
struct CodecOf<kType, Numbers::kFloat> {
  using Stored = typename Integer<traits_of(kType).size>::Unsigned;
  using Accumulator = float;
  DEVICE float widen(Stored value) { return float_from<kType, float>(std::uint32_t{value}); }
  DEVICE Stored narrow(float value) {
    return static_cast<Stored>(rounded_to<kType, std::uint32_t>(value));
  }
};

template <>
struct CodecOf<Dtype::kFloat32> : Plain<float> {
  DEVICE float narrow(float value) { return canonical<std::uint32_t>(value, kNanFloat32); }
};

template <>
struct CodecOf<Dtype::kFloat64> : Plain<double> {
  DEVICE double narrow(double value) { return canonical<std::uint64_t>(value, kNanFloat64); }
};

// On the GPU by instruction, exact and to nearest even, subnormals kept; the NaN is ours.
template <>
struct CodecOf<Dtype::kFloat16> {
  using Stored = std::uint16_t;
  using Accumulator = float;
  DEVICE float widen(std::uint16_t value) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
#else
    return float_from<Dtype::kFloat16, float>(std::uint32_t{value});
#endif
  }
  DEVICE std::uint16_t narrow(float value) {
#if defined(__CUDA_ARCH__)
    std::uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return value == value ? bits : static_cast<std::uint16_t>(kNanFloat16);
#else
    return static_cast<std::uint16_t>(rounded_to<Dtype::kFloat16, std::uint32_t>(value));
#endif
  }
};

}  // namespace pycollective::cuda
