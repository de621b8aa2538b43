// What each element type is, and which reduce operations it has: the one table. All else, here and
// in Python (`_core.dtypes()`), is read from it. How its numbers combine is in numerics.h and
// kernels/, which check themselves against it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

enum class Dtype : std::uint8_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
};
constexpr int kDtypes = 10;

enum class Numbers : std::uint8_t { kFloat, kInteger, kTruth };

// DLPack's numbers of kinds of types.
enum class DlpackCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6 };

struct DtypeTraits {
  Dtype dtype;
  const char* name;   // ours, NumPy's or ml_dtypes', and torch's
  const char* alias;  // nccl-tests' name, where it is another
  Numbers numbers;
  std::size_t size;         // bytes
  std::size_t accumulator;  // bytes of the type in which sums and products are computed
  int mantissa;             // bits of a float's that are stored
  std::uint64_t nan;        // bits of a float's one quiet NaN
  char numpy_kind;          // NumPy's own types, by kind and size; 0: one of ml_dtypes', by name
  DlpackCode dlpack;        // with 8 * size bits
};

// clang-format off: a table
constexpr DtypeTraits kDtypeTable[kDtypes] = {
    {Dtype::kFloat16,  "float16",  "half",   Numbers::kFloat,   2, 4, 10, 0x7E00,             'f', DlpackCode::kFloat},
    {Dtype::kBFloat16, "bfloat16", nullptr,  Numbers::kFloat,   2, 4, 7,  0x7FC0,             0,   DlpackCode::kBFloat},
    {Dtype::kFloat32,  "float32",  "float",  Numbers::kFloat,   4, 4, 23, 0x7FC00000,         'f', DlpackCode::kFloat},
    {Dtype::kFloat64,  "float64",  "double", Numbers::kFloat,   8, 8, 52, 0x7FF8000000000000, 'f', DlpackCode::kFloat},
    {Dtype::kInt8,     "int8",     nullptr,  Numbers::kInteger, 1, 1, 0,  0,                  'i', DlpackCode::kInt},
    {Dtype::kInt16,    "int16",    nullptr,  Numbers::kInteger, 2, 2, 0,  0,                  'i', DlpackCode::kInt},
    {Dtype::kInt32,    "int32",    nullptr,  Numbers::kInteger, 4, 4, 0,  0,                  'i', DlpackCode::kInt},
    {Dtype::kInt64,    "int64",    nullptr,  Numbers::kInteger, 8, 8, 0,  0,                  'i', DlpackCode::kInt},
    {Dtype::kUInt8,    "uint8",    nullptr,  Numbers::kInteger, 1, 1, 0,  0,                  'u', DlpackCode::kUInt},
    {Dtype::kBool,     "bool",     nullptr,  Numbers::kTruth,   1, 1, 0,  0,                  'b', DlpackCode::kBool},
};
// clang-format on

constexpr const DtypeTraits& traits_of(Dtype dtype) { return kDtypeTable[static_cast<int>(dtype)]; }
constexpr std::size_t size_of(Dtype dtype) { return traits_of(dtype).size; }
constexpr const char* name_of(Dtype dtype) { return traits_of(dtype).name; }

enum class ReduceOp : std::uint8_t { kSum, kAvg, kProd, kMin, kMax, kBand, kBor, kBxor };
constexpr int kReduceOps = 8;

struct ReduceOpTraits {
  ReduceOp op;
  const char* name;
  bool ordered;  // of floats: rounds, so the order shows, and partial results stay unrounded
  // For which numbers it has a meaning (docs/contract.md).
  bool floats;
  bool integers;
  bool truths;
};

constexpr ReduceOpTraits kReduceOpTable[kReduceOps] = {
    {ReduceOp::kSum, "sum", true, true, true, false},
    {ReduceOp::kAvg, "avg", true, true, false, false},
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
