// What the core offers to its callers: the Python binding and the torch shim.
//
// The interface is virtual so that the torch shim, another shared object, links nothing of the
// core: it receives a pointer in a capsule and calls through the table.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "types.h"

#define PYCOLLECTIVE_PUBLIC __attribute__((visibility("default")))

namespace pycollective {

enum class FailureKind : std::uint8_t {
  kNone,
  kPeerFailure,
  kTimeout,
  kMismatch,
  kAborted,
  kConfiguration,  // bad arguments: raised before anything moves, the communicator stays usable
};

struct Program;  // engine/plans/program.h

struct Failure {
  // A failure of no operation, such as a dead peer that was found between calls.
  static Failure of_no_operation(FailureKind kind, int rank, std::string message) {
    return {kind, rank, OpKind::kBarrier, 0, std::move(message)};
  }
  bool names_operation() const { return sequence != 0; }

  FailureKind kind = FailureKind::kNone;
  int rank = -1;                 // the rank that reports
  OpKind op = OpKind::kBarrier;  // says nothing where `sequence` is 0
  std::uint64_t sequence = 0;    // number of the operation in its communicator, from 1; 0: none
  std::string message;           // names the culprit and the cure
};

class PYCOLLECTIVE_PUBLIC CollectiveFailure : public std::runtime_error {
 public:
  explicit CollectiveFailure(Failure failure)
      : std::runtime_error(failure.message), failure_(std::move(failure)) {}
  const Failure& failure() const { return failure_; }

 private:
  Failure failure_;
};

// Where the buffers of a call lie.
struct Location {
  static constexpr int kHost = -1;
  static constexpr int kAnyDevice = -2;  // of empty buffers, which lie nowhere
  int device = kHost;                    // or a GPU's number, as CUDA counts
  void* stream = nullptr;  // the driver's handle: what was put there before comes first
  bool ends = true;  // done means done there too: else the result comes in that stream's order
  bool on_host() const { return device == kHost; }
};

// A blocked call asks this at least every 50 ms. Where it returns true the call aborts the group
// and throws kAborted. May be empty.
using InterruptHook = std::function<bool()>;

// recv takes the first message with its tag, whichever rank sends it.
constexpr int kAnySource = -1;
// Tags from -1 to -kOwnTags are the library's own. Some announcements and lanes are set aside for
// them, so users' messages cannot block them.
constexpr int kAllToAllVTag = -1;
constexpr int kBarrierTag = -2;  // monitored_barrier's
constexpr int kOwnTags = 2;

// What a rank sends to and receives from one other in an all_to_all_v. Counts are in elements; each
// rank knows its own alone.
struct AllToAllVPart {
  const void* input = nullptr;
  std::size_t send_count = 0;
  void* output = nullptr;
  std::size_t recv_count = 0;
};

// What a rank gives to a reduction whose leaves are dealt to the ranks
// (pycollective/leaves/deal.py), in place of an input: the nodes of the order that make up its
// leaves, in fp32.
struct DealtNodes {
  std::vector<float*> rows;       // each node's, ascending, each as long as the input would be
  std::uint64_t deal = 0;         // the deal's digest; the same on all ranks, like what follows
  int leaves = 0;                 // of all ranks
  Dtype dtype = Dtype::kFloat32;  // of the result
  ReduceOp reduce_op = ReduceOp::kSum;
  double divisor = 0;  // of kAvg; the sums are fp32
};

// One operation. `count` is in elements:
//   all_reduce, reduce, broadcast, send, recv   of the buffer
//   reduce_scatter, all_gather, all_to_all,
//   gather, scatter                             of one shard; ignored where `counts` is given
// `counts` (reduce_scatter, all_gather, gather, scatter): elements of each rank's shard, in rank
// order. Buffers that hold all shards hold them contiguously in rank order.
// `input` and `output` may be equal (in place), or one the caller's own shard of the other;
// otherwise they must not overlap. The root of a broadcast, and send, use `input` alone; the other
// ranks of a broadcast, and recv, `output` alone. The caller keeps both alive until done. A
// reduction of `nodes` has no input: it reads their rows, which lie apart from the output.
struct Request {
  OpKind kind = OpKind::kBarrier;
  Dtype dtype = Dtype::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  int root = 0;  // the root, or the peer of send and recv; of recv also kAnySource
  int tag = 0;   // of send and recv: these meet where their tags are the same
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  std::vector<std::size_t> counts;
  // An all_to_all with uneven shards: what this rank sends to and receives from each rank, in rank
  // order, in place of input, output and count. Null: equal shards. All ranks give it, or none.
  std::shared_ptr<const std::vector<AllToAllVPart>> all_to_all_v;
  // A reduction to floats up to fp32, kSum or kAvg. Without a program each rank of the one host has
  // one node, all of as many leaves, in rank order; their rows may be overwritten. Null: each rank
  // gives its input. All ranks give it, or none.
  std::shared_ptr<const DealtNodes> nodes;
  // recv from kAnySource writes the sender's rank here before it is done. May be null.
  int* source = nullptr;
  double timeout = 0;  // seconds; 0: the communicator's
  Location location;   // of both buffers; may differ from rank to rank
  // Keeps both buffers alive for a message to another host that a failed operation leaves under
  // way. May be empty where there is no other host.
  std::shared_ptr<const void> keep;
  Wire wire = Wire::kDefault;
  // The program of the algorithm that was asked for, for this kind, root and rank; none: the
  // communicator chooses.
  std::shared_ptr<const Program> program;
};

// What an average divides by.
inline double divisor_of(const Request& request, int ranks) {
  return request.nodes ? request.nodes->divisor : double(ranks);
}

// An operation under way. Thread-safe.
class PYCOLLECTIVE_PUBLIC Work {
 public:
  virtual ~Work() = default;
  virtual bool done() const = 0;
  // Blocks until the operation is done, at most `timeout` seconds (0: until the operation's own
  // timeout). Returns false if it is not done by then; the operation goes on. Throws
  // CollectiveFailure if the operation failed.
  virtual bool wait(double timeout, const InterruptHook& interrupted) = 0;
  // The error for a caller whose wait of `timeout` seconds returned false.
  virtual Failure ran_out(double timeout) const = 0;
  // The failure of a done operation; nullptr if it succeeded or is not done.
  virtual const Failure* failure() const = 0;
  // The rank whose message a recv that has succeeded received.
  virtual int source() const = 0;
};

// A communicator, as the core knows it. Thread-safe; operations run in the order of the calls.
class PYCOLLECTIVE_PUBLIC Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Throws CollectiveFailure (kConfiguration) for an invalid request, before it has any effect.
  virtual void run(const Request& request, const InterruptHook& interrupted) = 0;
  // `on_done` (may be empty) is called once, on the thread that finished the operation (the
  // progress thread, or the caller's before submit returns); nullptr means success. It must be
  // quick, must not throw and must not wait for a collective.
  virtual std::shared_ptr<Work> submit(const Request& request,
                                       std::function<void(const Failure*)> on_done) = 0;
  // Whether requests need `keep`: a failed call may leave messages to other hosts under way.
  virtual bool wants_keep() const = 0;
  // `bytes` of memory for arrays, on this thread's NUMA node, which ranks of this host read in
  // place. The contents are undefined. It is freed with the last share of it, and may outlive the
  // communicator. Throws CollectiveFailure (kConfiguration) where there is not so much.
  virtual std::shared_ptr<std::byte> allocate(std::size_t bytes) = 0;
  // The wire for requests with Wire::kDefault. The same on all ranks, and not kDefault.
  virtual void set_wire(Wire wire) = 0;
  virtual Wire wire() const = 0;
  virtual double timeout() const = 0;
  virtual void set_timeout(double seconds) = 0;
  // Fails the communicator on every rank; no peer has to cooperate.
  virtual void abort(const std::string& reason) = 0;
  // Waits for the operations that were issued, then leaves. Idempotent.
  virtual void close() = 0;
  // The cause that failed this communicator; nullptr while it works.
  virtual std::shared_ptr<const Failure> failure() = 0;
};

// Name of the capsule that carries a `std::shared_ptr<Collectives>*` from the binding to the shim.
constexpr const char* kCapsuleName = "pycollective.Collectives.v3";

}  // namespace pycollective
