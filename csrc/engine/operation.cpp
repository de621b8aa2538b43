#include "engine/operation.h"

namespace pycollective {

std::uint64_t signature_of(const Request& request) {
  // The reduce op of an operation that only moves bytes means nothing, so it must not differ.
  const auto op = reduces(request.kind) ? static_cast<std::uint64_t>(request.reduce_op) : 0;
  return static_cast<std::uint64_t>(request.kind) | static_cast<std::uint64_t>(request.dtype) << 8 |
         op << 16 | static_cast<std::uint64_t>(request.root) << 24;  // the upper 40 bits
}

std::uint64_t hash_of(const std::vector<std::size_t>& counts) {
  if (counts.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over the counts' words
  for (const std::uint64_t count : counts) hash = (hash ^ count) * 0x100000001b3 ^ (hash >> 29);
  return hash | 1;
}

std::string describe_call(std::uint64_t signature, std::uint64_t count, std::uint64_t counts_hash,
                          const char* algorithm) {
  const auto number = [&](int shift) { return static_cast<int>(signature >> shift & 0xff); };
  // From another rank, and perhaps broken.
  if (number(0) >= kOpKinds || number(8) >= kDtypes || number(16) >= kReduceOps)
    return "an operation that is not known here";
  const auto kind = static_cast<OpKind>(number(0));
  std::string text = name_of(kind);
  if (kind == OpKind::kBarrier) return text + "()";
  text += std::string("(") + name_of(static_cast<Dtype>(number(8))) + ", ";
  if (reduces(kind)) text += name_of(static_cast<ReduceOp>(number(16))) + std::string(", ");
  text += counts_hash != 0 ? "uneven counts" : "count " + std::to_string(count);
  if (traits_of(kind).rooted) text += ", root " + std::to_string(signature >> 24);
  if (*algorithm != '\0') text += std::string(", algorithm ") + algorithm;
  return text + ")";
}

}  // namespace pycollective
