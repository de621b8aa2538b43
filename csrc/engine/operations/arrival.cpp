#include "engine/operations/arrival.h"

#include <cstdio>

#include "engine/plans/program.h"

namespace pycollective {
namespace {

// CallSignature::fields has kind, dtype, reduce op and wire in a byte each, and the root in the
// upper half. Flags in the wire's byte: kOnDevice, GPU kernels carry it out; kCaptured, a graph has
// captured it; kDealt, a reduction of nodes that were dealt.
constexpr int kKindAt = 0;
constexpr int kDtypeAt = 8;
constexpr int kReduceOpAt = 16;
constexpr int kWireAt = 24;
constexpr int kRootAt = 32;
constexpr std::uint64_t kOnDevice = 0x20;
constexpr std::uint64_t kCaptured = 0x10;
constexpr std::uint64_t kDealt = 0x40;
// Of such a reduction counts_hash has the divisor's bits; so a hash of uneven counts stands in
// place of the count, with this bit, which no count has.
constexpr std::uint64_t kUnevenCount = std::uint64_t{1} << 63;
// An all_to_all_v has this in place of a hash: its counts differ from rank to rank.
constexpr std::uint64_t kUneven = 1;

std::uint64_t fields_of(const Task& task) {
  const Request& request = *task.request;
  // An operation that only moves bytes ignores its reduce op, so it must not be compared.
  // Of nodes, by whichever path, the result's type and op count.
  const DealtNodes* nodes = request.nodes.get();
  const auto op = !reduces(request.kind) ? 0
                  : nodes != nullptr     ? static_cast<std::uint64_t>(nodes->reduce_op)
                                         : static_cast<std::uint64_t>(request.reduce_op);
  const Dtype dtype = nodes != nullptr ? nodes->dtype : request.dtype;
  return static_cast<std::uint64_t>(request.kind) << kKindAt |
         static_cast<std::uint64_t>(dtype) << kDtypeAt | op << kReduceOpAt |
         (static_cast<std::uint64_t>(task.wire) |
          (task.device ? kOnDevice | (task.captured ? kCaptured : 0) : 0) |
          (request.nodes ? kDealt : 0))
             << kWireAt |
         static_cast<std::uint64_t>(request.root) << kRootAt;
}

int byte_of(const CallSignature& called, int shift) {
  return static_cast<int>(called.fields >> shift & 0xff);
}

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
  double divisor = 0;
  std::memcpy(&divisor, &called.counts_hash, sizeof(divisor));
  std::string both = text;
  std::snprintf(text, sizeof(text), ", divisor %.17g", divisor);
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
  CallSignature made;
  made.fields = fields_of(task);
  made.count = request.counts.empty() ? request.count : 0;
  made.counts_hash = is_pair(request.kind)  ? static_cast<std::uint32_t>(request.tag)
                     : request.all_to_all_v ? kUneven
                                            : hash_of(request.counts);
  if (request.nodes) {
    if (!request.counts.empty()) made.count = made.counts_hash | kUnevenCount;
    made.counts_hash = 0;
    if (request.nodes->reduce_op == ReduceOp::kAvg)
      std::memcpy(&made.counts_hash, &request.nodes->divisor, sizeof(made.counts_hash));
    made.deal = static_cast<std::uint32_t>(request.nodes->deal >> 32);
  }
  if (task.program) {
    const std::string& name = task.program->algorithm;  // no longer than it may be: check()
    std::memcpy(made.algorithm, name.data(), name.size());
  }
  return made;
}

bool agree_as_pair(const CallSignature& a, const CallSignature& b) {
  return a.count == b.count && byte_of(a, kDtypeAt) == byte_of(b, kDtypeAt);
}

std::string describe(const CallSignature& called) {
  const int number = byte_of(called, kKindAt);
  const int dtype = byte_of(called, kDtypeAt);
  const int reduce_op = byte_of(called, kReduceOpAt);
  if (number >= kOpKinds || dtype >= kDtypes || reduce_op >= kReduceOps)
    return "an operation that is not known here";
  const auto kind = static_cast<OpKind>(number);
  std::string text = name_of(kind);
  const auto how = static_cast<std::uint64_t>(byte_of(called, kWireAt));
  if (kind == OpKind::kBarrier) return text + "()";
  text += std::string("(") + name_of(static_cast<Dtype>(dtype)) + ", ";
  if (reduces(kind)) text += name_of(static_cast<ReduceOp>(reduce_op)) + std::string(", ");
  const bool pair = is_pair(kind);
  const bool dealt = (how & kDealt) != 0;
  const bool uneven = dealt ? (called.count & kUnevenCount) != 0 : called.counts_hash != 0 && !pair;
  text += uneven ? "uneven counts" : "count " + std::to_string(called.count);
  if (pair && tag_of(called) != 0) text += ", tag " + std::to_string(tag_of(called));
  if (traits_of(kind).rooted) text += ", root " + std::to_string(called.fields >> kRootAt);
  const std::string name(called.algorithm, strnlen(called.algorithm, sizeof(called.algorithm)));
  if (!name.empty()) text += ", algorithm " + name;
  if (dealt) text += describe_deal(called, static_cast<ReduceOp>(reduce_op));
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
    const int dtype = byte_of(called, kDtypeAt);
    return std::to_string(called.count) + " elements of " +
           (dtype < kDtypes ? name_of(static_cast<Dtype>(dtype)) : "a type not known here");
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

ArrivalBarrier::ArrivalBarrier(Group& group, const Task& task, std::uint64_t sequence)
    : group_(group), sequence_(sequence), kind_(task.request->kind), mine_(signature_of(task)) {}

void ArrivalBarrier::arrive(std::uint64_t input) {
  Arrival& mine = line(group_.me());
  // Peers that wait look at this line all the time. A store of what it holds already would bring it
  // here, and they would take it away again before the number is stored.
  if (!agree(mine.called, mine_)) mine.called = mine_;
  if (mine.input != input) mine.input = input;
  group_.publish(mine.sequence, sequence_);
}

bool ArrivalBarrier::complete() {
  for (; next_ < group_.size(); ++next_) {
    if (!arrived(Member(next_))) return false;
    compare(Member(next_));
  }
  // The line of the next call is this core's to write by then: nobody looks at it any more.
  __builtin_prefetch(&group_.own().arrival[(sequence_ + 1) & 1], 1);
  return true;
}

void ArrivalBarrier::compare_arrived() const {
  for (int r = next_; r < group_.size(); ++r)
    if (arrived(Member(r))) compare(Member(r));
}

void ArrivalBarrier::compare(Member peer) const {
  if (!agree(line(peer).called, mine_)) throw_mismatch(peer);
}

void ArrivalBarrier::throw_mismatch(Member peer) const {
  pycollective::throw_mismatch(
      {group_.world().rank, kind_, sequence_, describe(mine_), group_.describe(peer),
       describe(line(peer).called)},
      "as operation number " + std::to_string(sequence_) + " of this communicator; no data moved");
}

}  // namespace pycollective
