#include "engine/call_signature.h"

#include <cstdio>

#include "engine/plans/program.h"

namespace pycollective {
namespace {

// Flags beside the wire: GPU kernels carry it out; a graph has captured it; it is a reduction of
// nodes that were dealt.
constexpr int kOnDevice = 0x20;
constexpr int kCaptured = 0x10;
constexpr int kDealt = 0x40;
// A hash of uneven counts that stands in place of the count, beside a divisor, has this bit, which
// no count has.
constexpr std::uint64_t kUnevenCount = std::uint64_t{1} << 63;
// An all_to_all_v has this in place of a hash: its counts differ from rank to rank.
constexpr std::uint64_t kUneven = 1;

std::uint64_t hash_of(const std::vector<std::size_t>& counts) {
  if (counts.empty()) return 0;
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over the counts' words
  for (const std::uint64_t count : counts) hash = (hash ^ count) * 0x100000001b3 ^ (hash >> 29);
  return hash | 1;
}

constexpr const char* kOfDeal = ", nodes of deal";

// "nodes of deal 1a2b3c4d, divisor 96"
std::string describe_deal(const CallSignature& called, ReduceOp op) {
  char text[64];
  std::snprintf(text, sizeof(text), "%s %08x", kOfDeal, static_cast<unsigned>(called.deal));
  if (op != ReduceOp::kAvg) return text;
  std::string both = text;
  std::snprintf(text, sizeof(text), ", divisor %.17g", called.divisor);
  return both + text;
}

[[noreturn]] void throw_told(const Mismatch& found, const std::string& where,
                             const std::string& cure) {
  const std::string rank = "rank " + std::to_string(found.rank);
  throw CollectiveFailure({FailureKind::kMismatch, found.rank, found.kind, found.sequence,
                           rank + " called " + found.mine + " and " + found.other + " called " +
                               found.theirs + " " + where + ". " + cure});
}

}  // namespace

CallSignature signature_of(const Task& task) {
  const Request& request = *task.request;
  // Of nodes, by whichever path, the result's type and op count.
  const DealtNodes* const nodes = request.nodes.get();
  const auto flag = [](bool is, int bit) { return is ? bit : 0; };
  CallSignature made;
  made.kind = static_cast<std::uint8_t>(request.kind);
  made.dtype = static_cast<std::uint8_t>(nodes != nullptr ? nodes->dtype : request.dtype);
  // An operation that only moves bytes ignores its reduce op, so it must not be compared.
  if (reduces(request.kind))
    made.reduce_op =
        static_cast<std::uint8_t>(nodes != nullptr ? nodes->reduce_op : request.reduce_op);
  made.how = static_cast<std::uint8_t>(
      static_cast<int>(task.wire) | flag(task.device != nullptr, kOnDevice) |
      flag(task.device != nullptr && task.captured, kCaptured) | flag(nodes != nullptr, kDealt));
  made.root = request.root;
  made.count = request.counts.empty() ? request.count : 0;
  if (is_pair(request.kind)) {
    made.message = {request.tag, 0, 0};
  } else if (nodes == nullptr) {
    made.counts_hash = request.all_to_all_v ? kUneven : hash_of(request.counts);
  } else {
    if (!request.counts.empty()) made.count = hash_of(request.counts) | kUnevenCount;
    if (nodes->reduce_op == ReduceOp::kAvg) made.divisor = nodes->divisor;
    made.deal = static_cast<std::uint32_t>(nodes->deal >> 32);
  }
  if (task.program) {
    const std::string& name = task.program->algorithm;  // no longer than it may be: check()
    std::memcpy(made.algorithm, name.data(), name.size());
  }
  return made;
}

bool agree_as_pair(const CallSignature& a, const CallSignature& b) {
  return a.count == b.count && a.dtype == b.dtype;
}

std::string describe(const CallSignature& called) {
  if (called.kind >= kOpKinds || called.dtype >= kDtypes || called.reduce_op >= kReduceOps)
    return "an operation that is not known here";
  const auto kind = static_cast<OpKind>(called.kind);
  const auto reduce_op = static_cast<ReduceOp>(called.reduce_op);
  const int how = called.how;
  std::string text = name_of(kind);
  if (kind == OpKind::kBarrier) return text + "()";
  text += std::string("(") + name_of(static_cast<Dtype>(called.dtype)) + ", ";
  if (reduces(kind)) text += name_of(reduce_op) + std::string(", ");
  const bool pair = is_pair(kind);
  const bool dealt = (how & kDealt) != 0;
  const bool uneven = dealt ? (called.count & kUnevenCount) != 0 : !pair && called.counts_hash != 0;
  text += uneven ? "uneven counts" : "count " + std::to_string(called.count);
  if (pair && called.message.tag != 0) text += ", tag " + std::to_string(called.message.tag);
  if (traits_of(kind).rooted) text += ", root " + std::to_string(called.root);
  const std::string name(called.algorithm, strnlen(called.algorithm, sizeof(called.algorithm)));
  if (!name.empty()) text += ", algorithm " + name;
  if (dealt) text += describe_deal(called, reduce_op);
  if (how & kOnDevice) text += ", on GPUs that map each other";
  if (how & kCaptured) text += ", captured in a graph";
  const auto wire = static_cast<Wire>(how & ~(kOnDevice | kCaptured | kDealt));
  if (wire == Wire::kRaw) text += ", wire raw";
  if (wire == Wire::kExact) text += ", wire exact";
  return text + ")";
}

void throw_mismatch(const Mismatch& found, const std::string& where) {
  const bool dealt = (found.mine + found.theirs).find(kOfDeal) != std::string::npos;
  throw_told(found, where,
             std::string("Every rank must make the same calls in the same order, with the same "
                         "dtype, count, operation, root, algorithm and wire") +
                 (dealt ? ", and nodes by the same deal and divisor" : ""));
}

void throw_pair_mismatch(const Request& mine, const Mismatch& found, const CallSignature& theirs,
                         const std::string& where) {
  if (mine.tag != kAllToAllVTag)
    throw_told(found, where, "Both must name the same dtype and count");
  const bool sends = mine.kind == OpKind::kSend;
  const auto what = [](const CallSignature& called) {
    return std::to_string(called.count) + " elements of " +
           (called.dtype < kDtypes ? name_of(static_cast<Dtype>(called.dtype))
                                   : "a type not known here");
  };
  const std::string self = "rank " + std::to_string(found.rank);
  const std::string sent = what(sends ? signature_of(Task(mine)) : theirs);
  const std::string expected = what(sends ? theirs : signature_of(Task(mine)));
  throw CollectiveFailure(
      {FailureKind::kMismatch, found.rank, OpKind::kAllToAll, found.sequence,
       "all_to_all number " + std::to_string(found.sequence) + ": " + (sends ? self : found.other) +
           " sends " + sent + " to " + (sends ? found.other : self) + ", which expects " +
           expected +
           "; no data moved between the two. What one rank sends to another must be what that one "
           "expects of it (in all_to_all_single: its input split the other's output split)"});
}

}  // namespace pycollective
