// Elements in kernels: how they are read and written, 16 bytes or one at a time, and how each type
// gets to its accumulator and back. numerics.h rounds, and knows each type's one NaN.
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

// Half a vector: of elements that take a whole one as accumulators. Multiples of 8.
template <class T, int N>
DEVICE Lanes<T, N> load_half(const void* from) {
#if defined(__CUDACC__)
  return bits_as<Lanes<T, N>>(*static_cast<const uint2*>(from));
#else
  Lanes<T, N> value;
  __builtin_memcpy(&value, __builtin_assume_aligned(from, kVectorBytes / 2), kVectorBytes / 2);
  return value;
#endif
}

template <class T, int N>
DEVICE void store_half(void* to, Lanes<T, N> value) {
#if defined(__CUDACC__)
  *static_cast<uint2*>(to) = bits_as<uint2>(value);
#else
  __builtin_memcpy(__builtin_assume_aligned(to, kVectorBytes / 2), &value, kVectorBytes / 2);
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
    return load_half<T, N>(from);
}

template <class T, int N>
DEVICE void store(void* to, Lanes<T, N> value) {
  if constexpr (N == 1)
    store_element<T>(to, value);
  else if constexpr (N * sizeof(T) == kVectorBytes)
    store_vector<T>(to, value);
  else
    store_half<T, N>(to, value);
}

// A number that is computed in its own type, and stored as it is.
template <class T>
struct Plain {
  using Stored = T;
  using Accumulator = T;
  DEVICE T widen(T value) { return value; }
  DEVICE T narrow(T value) { return value; }
};

struct Float32 : Plain<float> {
  DEVICE float narrow(float value) { return canonical<std::uint32_t>(value, kNanFloat32); }
};

struct Float64 : Plain<double> {
  DEVICE double narrow(double value) { return canonical<std::uint64_t>(value, kNanFloat64); }
};

struct BFloat16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  DEVICE float widen(std::uint16_t value) { return bits_as<float>(std::uint32_t{value} << 16); }
  DEVICE std::uint16_t narrow(float value) {
    return static_cast<std::uint16_t>(round_to_bfloat16<std::uint32_t>(value) >> 16);
  }
};

// On the GPU by instruction, exact and to nearest even, subnormals kept; the NaN is ours.
struct Float16 {
  using Stored = std::uint16_t;
  using Accumulator = float;
  DEVICE float widen(std::uint16_t value) {
#if defined(__CUDA_ARCH__)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
#else
    return float_from_float16<float>(std::uint32_t{value});
#endif
  }
  DEVICE std::uint16_t narrow(float value) {
#if defined(__CUDA_ARCH__)
    std::uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return value == value ? bits : static_cast<std::uint16_t>(kNanFloat16);
#else
    return static_cast<std::uint16_t>(float16_from_float<std::uint32_t>(value));
#endif
  }
};

}  // namespace pycollective::cuda
