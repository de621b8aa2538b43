// Whether packing pays, for one kind of call: tried in its first calls, then agreed on.
//
// The first calls of a kind travel raw and packed in turn, each behind a barrier, so that it does
// not count how late a rank comes; each rank notes how long they took from when all it exchanges
// messages with had called. Before the call after these the communicator reduces both times to the
// slowest rank's; so all ranks go on by the same two numbers. What is a kind, and which call is the
// how many-eth, follows from the calls alone.
#pragma once

#include <array>
#include <cstddef>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "engine/task.h"

namespace pycollective {

class WireTrial {
 public:
  static constexpr int kTriesEach = 3;
  static constexpr int kTries = 2 * kTriesEach;

  // Numbers from 0. What follows is for the thread that drives the call of that number: the calls
  // of a communicator are carried out one after the other.
  int next_call() { return calls_++; }
  static bool is_try(int call) { return call < kTries; }
  bool packs(int call) const {
    if (is_try(call)) return call % 2 != 0;
    return agreed_[1] < agreed_[0];
  }
  void took(int call, double seconds) {
    double& least = least_[call % 2];
    if (seconds < least) least = seconds;
  }

  // What the communicator carries out before a call of a trial; nothing after the first kTries + 1.
  // `call`: with the trial, and its number.
  static std::optional<Request> before(const Task& call);

 private:
  static constexpr double kNever = std::numeric_limits<double>::max();

  int calls_ = 0;
  std::array<double, 2> least_ = {kNever, kNever};   // seconds, raw and packed
  std::array<double, 2> agreed_ = {kNever, kNever};  // the slowest rank's
};

// The trials of a communicator. Thread-safe.
class WireTrials {
 public:
  // Of the request's kind, and which call of it this is; none where packing can save nothing worth
  // the trial: other types than floats of 16 and 32 bits, and less than kLeast bytes.
  struct NextCall {
    std::shared_ptr<WireTrial> trial;
    int call = 0;
  };
  NextCall next(const Task& task, int ranks);

  // Bytes of a rank's input or output. What goes to another host is a part of that, and below some
  // tens of KB a message's latency is longer than its bytes take on any link.
  static constexpr std::size_t kLeast = std::size_t{128} << 10;

 private:
  struct Kind {
    OpKind kind;
    Dtype dtype;
    ReduceOp reduce_op;
    int root;
    int magnitude;  // of the bytes: their logarithm
    const Program* program;
    bool operator==(const Kind& other) const {
      return kind == other.kind && dtype == other.dtype && reduce_op == other.reduce_op &&
             root == other.root && magnitude == other.magnitude && program == other.program;
    }
  };
  struct Hash {
    std::size_t operator()(const Kind& each) const;
  };
  struct Known {
    std::shared_ptr<const Program> program;  // so that no other gets its address
    std::shared_ptr<WireTrial> trial;
  };

  std::mutex mutex_;
  std::unordered_map<Kind, Known, Hash> known_;
};

// Whether the task's messages to other hosts are packed.
inline bool packs(const Task& task) {
  if (task.wire == Wire::kExact) return true;
  return task.wire == Wire::kAuto && task.trial && task.trial->packs(task.call_of_trial);
}

}  // namespace pycollective
