// Which of two ways to do the same thing, by what either has cost lately.
//
// What is fast differs between processors, and the host of a virtual machine may move its cores at
// any time: a broadcast of 1 MiB through slots takes ten times as long by plain stores as by
// streaming ones where caches are far, and an all-to-all of 256 KiB twice as long by streaming ones
// where they are near. No bit depends on the way.
//
// Now and then two calls go the other way: a probe. If the better of the two cost clearly less than
// the best of the last five calls, the other way is taken from then on. A probe comes
//   after kCalls calls, times as many as the other way was worse in the last probe, so that probes
//     add less than 2 / kCalls to the time;
//   after a quarter of these if the calls have come to cost clearly more or less since;
//   at once if they cost clearly more than the other way did in the last probe.
// The best of several counts: a call in which a thread was interrupted looks dearer than it is.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace pycollective {

// Of calls of one kind and about one size, in one rank; one thread at a time.
class Chooser {
 public:
  static constexpr int kCalls = 128;

  explicit Chooser(bool second = false) : chosen_(second) {}

  // Whether calls go the second way.
  bool chosen() const { return chosen_; }
  // Whether the next one does: it may be a probe.
  bool next() const { return chosen_ != (probes_left_ > 0); }

  // What a call has cost that went the first or the second way: time for each byte.
  void record(bool second, double cost) {
    const float each = std::max(static_cast<float>(cost), kLeastCost);
    if (second != chosen_) {
      if (probes_left_ == 0) return;
      other_cost_ = std::min(other_cost_, each);
      if (--probes_left_ == 0) end_probe();
      return;
    }
    last_[calls_++ % last_.size()] = each;
    if (calls_ < last_.size()) return;
    const float own = own_cost();
    const bool has_changed = own > kClearly * cost_at_probe_ || cost_at_probe_ > kClearly * own;
    if (calls_ >= (has_changed ? until_probe_ / 4 : until_probe_) || other_is_better(own)) {
      probes_left_ = kProbe;
      other_cost_ = kUnknown;
    }
  }

 private:
  static constexpr float kClearly = 1.25F;
  static constexpr float kUnknown = 1e30F;
  static constexpr float kLeastCost = 1e-30F;  // of a call within one tick of the clock: no 0/0
  static constexpr std::uint8_t kProbe = 2;

  float own_cost() const { return *std::min_element(last_.begin(), last_.end()); }

  bool other_is_better(float own) const { return own > kClearly * other_cost_; }

  void end_probe() {
    float own = own_cost();
    if (other_is_better(own)) {
      chosen_ = !chosen_;
      std::swap(own, other_cost_);
      last_.fill(own);
    }
    constexpr float kRarest = 1000;
    const float worse = std::clamp(other_cost_ / own, 1.0F, kRarest);
    cost_at_probe_ = own;
    until_probe_ = static_cast<std::uint32_t>(kCalls * worse);
    calls_ = 0;
  }

  std::array<float, 5> last_{};    // what the last calls of that way cost
  float cost_at_probe_ = 0;        // of the chosen way, in the last probe
  float other_cost_ = kUnknown;    // in the last probe
  std::uint32_t calls_ = 0;        // since the last probe
  std::uint32_t until_probe_ = 0;  // the first comes once last_ is full
  std::uint8_t probes_left_ = 0;   // calls
  bool chosen_;
};

// Tells a chooser what a call has cost.
class CallTimer {
 public:
  void begin() { begin_ = std::chrono::steady_clock::now(); }
  void end(Chooser& chooser, bool second, std::size_t bytes) const {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin_;
    chooser.record(second, taken.count() / static_cast<double>(bytes));
  }

 private:
  std::chrono::steady_clock::time_point begin_;
};

}  // namespace pycollective
