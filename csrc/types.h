// The words that every native file shares: element types, reduce operations, kinds of collective.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

// Ranks of a communicator, over all hosts. (Those of one host are Members, transport/member.h.)
// More would need shards of pairs to be counted in more than 31 bits (engine/program.h), and
// recipes a deeper stack than 16 operands (kernels/combine.h).
constexpr int kMaxRanks = 1 << 15;

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

enum class ReduceOp : std::uint8_t { kSum, kAvg, kProd, kMin, kMax, kBand, kBor, kBxor };
constexpr int kReduceOps = 8;

enum class OpKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kReduce,
  kBroadcast,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv,
  kBarrier,
};
constexpr int kOpKinds = 11;

constexpr std::size_t size_of(Dtype dtype) {
  constexpr std::size_t sizes[kDtypes] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 1};
  return sizes[static_cast<int>(dtype)];
}

constexpr const char* name_of(Dtype dtype) {
  constexpr const char* names[kDtypes] = {"float16", "bfloat16", "float32", "float64", "int8",
                                          "int16",   "int32",    "int64",   "uint8",   "bool"};
  return names[static_cast<int>(dtype)];
}

constexpr const char* name_of(ReduceOp op) {
  constexpr const char* names[kReduceOps] = {"sum", "avg",  "prod", "min",
                                             "max", "band", "bor",  "bxor"};
  return names[static_cast<int>(op)];
}

constexpr const char* name_of(OpKind kind) {
  constexpr const char* names[kOpKinds] = {"all_reduce", "reduce_scatter", "all_gather", "reduce",
                                           "broadcast",  "all_to_all",     "gather",     "scatter",
                                           "send",       "recv",           "barrier"};
  return names[static_cast<int>(kind)];
}

constexpr bool is_float(Dtype dtype) { return dtype <= Dtype::kFloat64; }

// Which reduce operations have a meaning for which type (docs/contract.md).
constexpr bool is_defined(Dtype dtype, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProd:
      return dtype != Dtype::kBool;
    case ReduceOp::kAvg:
      return is_float(dtype);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return true;
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !is_float(dtype);
  }
  return false;
}

// Whether an operation computes, or only moves bytes.
constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduceScatter || kind == OpKind::kReduce;
}

}  // namespace pycollective
