// What each element type is, and which reduce operations it has: the one table. All else, here and
// in Python (`_core.dtypes()`), is read from it. How its numbers combine is in numerics.h and
// kernels/, which check themselves against it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// ROW(X, numbers, type, name, alias, size, accumulator, mantissa, largest, nan, numpy_kind, dlpack)
// for each element type, with whatever X its user needs; DtypeTraits says what the columns are. The
// order is part of what ranks tell each other and of `pycollective verify`: new rows go last.
// clang-format off: a table
#define PYCOLLECTIVE_EACH_DTYPE(ROW, X) \
  ROW(X, kFloat,   kFloat16,  float16,  "half",   2, 4, 10, 0x7BFF,             0x7E00,             'f', kFloat) \
  ROW(X, kFloat,   kBFloat16, bfloat16, nullptr,  2, 4, 7,  0x7F7F,             0x7FC0,             0,   kBFloat) \
  ROW(X, kFloat,   kFloat32,  float32,  "float",  4, 4, 23, 0x7F7FFFFF,         0x7FC00000,         'f', kFloat) \
  ROW(X, kFloat,   kFloat64,  float64,  "double", 8, 8, 52, 0x7FEFFFFFFFFFFFFF, 0x7FF8000000000000, 'f', kFloat) \
  ROW(X, kInteger, kInt8,     int8,     nullptr,  1, 1, 0,  0,                  0,                  'i', kInt)   \
  ROW(X, kInteger, kInt16,    int16,    nullptr,  2, 2, 0,  0,                  0,                  'i', kInt)   \
  ROW(X, kInteger, kInt32,    int32,    nullptr,  4, 4, 0,  0,                  0,                  'i', kInt)   \
  ROW(X, kInteger, kInt64,    int64,    nullptr,  8, 8, 0,  0,                  0,                  'i', kInt)   \
  ROW(X, kInteger, kUInt8,    uint8,    nullptr,  1, 1, 0,  0,                  0,                  'u', kUInt)  \
  ROW(X, kTruth,   kBool,     bool,     nullptr,  1, 1, 0,  0,                  0,                  'b', kBool) \
  ROW(X, kFloat,   kFloat8E4M3, float8_e4m3fn, nullptr, 1, 4, 3, 0x7E, 0x7F, 0, kFloat8E4M3) \
  ROW(X, kFloat,   kFloat8E5M2, float8_e5m2,   nullptr, 1, 4, 2, 0x7B, 0x7E, 0, kFloat8E5M2)
// clang-format on

#define PYCOLLECTIVE_NAME(X, numbers, type, ...) type,
enum class Dtype : std::uint8_t { PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_NAME, ) };
#undef PYCOLLECTIVE_NAME

enum class Numbers : std::uint8_t { kFloat, kInteger, kTruth };

// DLPack's numbers of kinds of types.
enum class DlpackCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kBool = 6,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 12
};

struct DtypeTraits {
  Dtype dtype;
  const char* name;   // ours, NumPy's or ml_dtypes', and torch's
  const char* alias;  // nccl-tests' name, where it is another
  Numbers numbers;
  std::size_t size;         // bytes
  std::size_t accumulator;  // bytes of the type in which sums and products are computed
  int mantissa;             // bits of a float's that are stored
  std::uint64_t largest;    // bits of a float's largest number; the next is its infinity, or NaN
  std::uint64_t nan;        // bits of a float's one quiet NaN
  char numpy_kind;          // NumPy's own types, by kind and size; 0: one of ml_dtypes', by name
  DlpackCode dlpack;        // with 8 * size bits
};

#define PYCOLLECTIVE_ROW(X, numbers, type, name, alias, size, accumulator, mantissa, largest, nan, \
                         numpy_kind, dlpack)                                                       \
  {Dtype::type, #name, alias,      Numbers::numbers,  size, accumulator, mantissa,                 \
   largest,     nan,   numpy_kind, DlpackCode::dlpack},
constexpr DtypeTraits kDtypeTable[] = {PYCOLLECTIVE_EACH_DTYPE(PYCOLLECTIVE_ROW, )};
#undef PYCOLLECTIVE_ROW
constexpr int kDtypes = static_cast<int>(sizeof(kDtypeTable) / sizeof(kDtypeTable[0]));

constexpr const DtypeTraits& traits_of(Dtype dtype) { return kDtypeTable[static_cast<int>(dtype)]; }
constexpr std::size_t size_of(Dtype dtype) { return traits_of(dtype).size; }
constexpr const char* name_of(Dtype dtype) { return traits_of(dtype).name; }

enum class ReduceOp : std::uint8_t { kSum, kAvg, kProd, kMin, kMax, kBand, kBor, kBxor };
constexpr int kReduceOps = 8;

struct ReduceOpTraits {
  ReduceOp op;
  const char* name;
  bool ordered;  // of floats: rounds, so the order shows, and partial results stay unrounded
  // For which numbers it has a meaning (docs/reference/contract.md).
  bool floats;
  bool integers;
  bool truths;
};

constexpr ReduceOpTraits kReduceOpTable[kReduceOps] = {
    {ReduceOp::kSum, "sum", true, true, true, false},
    {ReduceOp::kAvg, "avg", true, true, true, false},
    {ReduceOp::kProd, "prod", true, true, true, false},
    {ReduceOp::kMin, "min", false, true, true, true},
    {ReduceOp::kMax, "max", false, true, true, true},
    {ReduceOp::kBand, "band", false, false, true, true},
    {ReduceOp::kBor, "bor", false, false, true, true},
    {ReduceOp::kBxor, "bxor", false, false, true, true},
};

constexpr const ReduceOpTraits& traits_of(ReduceOp op) {
  return kReduceOpTable[static_cast<int>(op)];
}
constexpr const char* name_of(ReduceOp op) { return traits_of(op).name; }

constexpr bool is_defined(Dtype dtype, ReduceOp op) {
  switch (traits_of(dtype).numbers) {
    case Numbers::kFloat:
      return traits_of(op).floats;
    case Numbers::kInteger:
      return traits_of(op).integers;
    case Numbers::kTruth:
      return traits_of(op).truths;
  }
  return false;
}

// Bytes of an element of a node, a partial result: of the accumulator where its bits would be lost.
constexpr std::size_t node_size(Dtype dtype, ReduceOp op) {
  const bool wide = traits_of(dtype).numbers == Numbers::kFloat && traits_of(op).ordered;
  return wide ? traits_of(dtype).accumulator : size_of(dtype);
}

namespace checks {
constexpr bool tables_are_in_order() {
  for (int i = 0; i < kDtypes; ++i)
    if (static_cast<int>(kDtypeTable[i].dtype) != i) return false;
  for (int i = 0; i < kReduceOps; ++i)
    if (static_cast<int>(kReduceOpTable[i].op) != i) return false;
  return true;
}
static_assert(tables_are_in_order());
}  // namespace checks

}  // namespace pycollective
