// Which kind of store a rank writes slots with, by what its own last stores have cost.
//
// Where caches are far, plain stores into lines that another core has read can take fifteen times
// as long as streaming ones; where they are near, they are the faster ones. The host of a virtual
// machine may move its cores at any time. Each rank chooses alone: the kind changes no step that a
// peer waits for, and no bit.
//
// Now and then two pieces are written the other way: a probe. If the better of the two cost clearly
// less than the best of the last five pieces, the other kind is used from then on. A probe comes
//   after kPieces pieces, times as many as the other kind was worse in the last probe, so that
//     probes add less than 2 / kPieces to the time;
//   after a quarter of these if the pieces have come to cost clearly more or less since;
//   at once if they cost clearly more than the other kind did in the last probe.
// The best of several counts: a piece in which a thread was interrupted looks dearer than it is.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

#include "kernels/copy.h"
#include "kernels/prefetching.h"

namespace pycollective {

enum class Stores { kPlain, kStreaming };

// Of one rank's writes to slots; one thread at a time.
class StoreChooser {
 public:
  static constexpr int kPieces = 128;

  // Copies a piece into a slot, prefetches what is read next, and learns what that cost. A flag
  // may follow at once.
  void write(std::byte* slot, const std::byte* from, std::size_t bytes, NextRead next_read = {}) {
    constexpr std::size_t kLeastMeasured = std::size_t{4} << 10;
    if (bytes < kLeastMeasured) return copy_bytes(slot, from, bytes);
    const auto begin = std::chrono::steady_clock::now();
    if (next() == Stores::kPlain) {
      copy_prefetching(copy_bytes, slot, from, bytes, next_read);
    } else {
      copy_prefetching(copy_streaming, slot, from, bytes, next_read);
      finish_stores();
    }
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    record(taken.count() / static_cast<double>(bytes));
  }

  // The kind for what is not measured.
  Stores chosen() const { return chosen_; }
  // The kind for the next piece.
  Stores next() const { return probes_left_ > 0 ? other() : chosen_; }

  // What that piece cost: time for each byte.
  void record(double cost) {
    cost = std::max(cost, kLeastCost);
    if (probes_left_ > 0) {
      other_cost_ = std::min(other_cost_, cost);
      if (--probes_left_ == 0) end_probe();
      return;
    }
    last_[pieces_++ % last_.size()] = cost;
    if (pieces_ < last_.size()) return;
    const double own = own_cost();
    const bool has_changed = own > kClearly * cost_at_probe_ || cost_at_probe_ > kClearly * own;
    if (pieces_ >= (has_changed ? until_probe_ / 4 : until_probe_) || other_is_better(own)) {
      probes_left_ = kProbe;
      other_cost_ = kUnknown;
    }
  }

 private:
  static constexpr double kClearly = 1.25;
  static constexpr double kUnknown = 1e30;
  static constexpr double kLeastCost = 1e-30;  // of a piece within one tick of the clock: no 0/0
  static constexpr int kProbe = 2;

  Stores other() const { return chosen_ == Stores::kPlain ? Stores::kStreaming : Stores::kPlain; }
  double own_cost() const { return *std::min_element(last_.begin(), last_.end()); }

  bool other_is_better(double own) const { return own > kClearly * other_cost_; }

  void end_probe() {
    double own = own_cost();
    if (other_is_better(own)) {
      chosen_ = other();
      std::swap(own, other_cost_);
      last_.fill(own);
    }
    constexpr double kRarest = 1000;
    const double worse = std::clamp(other_cost_ / own, 1.0, kRarest);
    cost_at_probe_ = own;
    until_probe_ = static_cast<std::size_t>(kPieces * worse);
    pieces_ = 0;
  }

  Stores chosen_ = Stores::kPlain;
  std::array<double, 5> last_{};  // what the last pieces of that kind cost
  std::size_t pieces_ = 0;        // since the last probe
  std::size_t until_probe_ = 0;   // the first comes once last_ is full
  double cost_at_probe_ = 0;      // of the chosen kind, in the last probe
  int probes_left_ = 0;           // pieces
  double other_cost_ = kUnknown;  // in the last probe
};

}  // namespace pycollective
