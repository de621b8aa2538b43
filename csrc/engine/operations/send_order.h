// Which sends to one peer may begin, where more wait than there are places for.
//
// Each tag's messages follow each other. Of every tag the first that lacks a place waits for one,
// also while one of its tag is before it that needs none; and of these the ones that were called
// first may have the places that are free. So as long as the peer leaves messages of fewer tags
// unreceived than there are places, it can receive any other: none that was called later has taken
// its place. Were a place given to whoever looks first, later ones might hold them all, and the
// receive that comes before theirs would wait for ever. (The price: places lie idle that are kept
// for sends which wait for one of their tag that needs none.)
//
// A call costs the logarithm of the sends that wait; one that waits looks at no more than there are
// places. One send after another allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <set>
#include <utility>

namespace pycollective {

// Of the sends that need a place, from their calls until they end. Each is known by its tag and its
// number, which grows with the calls. Thread-safe, with a lock of its own: calls are told of under
// the communicator's, and must not wait for what is copied or sent.
class SendOrder {
 public:
  explicit SendOrder(std::size_t places) : free_(places) {}

  // In the order of the calls.
  void call(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto at = sends_.put({tag, number});
    if (at == sends_.all.begin() || std::prev(at)->first != tag) lacking_.put(number);
  }
  // For the first of its tag; false while what is free is for others.
  bool take_place(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    std::size_t left = free_;
    const auto& lacking = lacking_.all;
    for (auto each = lacking.begin(); left > 0 && each != lacking.end() && *each < number; ++each)
      --left;
    if (left == 0) return false;
    lacking_.take(lacking.find(number));
    --free_;
    return true;
  }
  // It gives its place back. The next of its tag lacks one from then on.
  void end(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    ++free_;
    const auto next = sends_.take(sends_.all.find({tag, number}));
    if (next != sends_.all.end() && next->first == tag) lacking_.put(next->second);
  }

 private:
  // A set that keeps the memory of what was taken last for what is put next.
  template <class Value>
  struct Kept {
    using Set = std::set<Value>;
    typename Set::iterator put(const Value& value) {
      if (spare.empty()) return all.insert(value).first;
      spare.value() = value;
      return all.insert(std::move(spare)).position;
    }
    // What is there, if any. The one behind it.
    typename Set::iterator take(typename Set::const_iterator at) {
      if (at == all.end()) return all.end();
      const auto next = std::next(at);
      spare = all.extract(at);
      return all.erase(next, next);
    }
    Set all;
    typename Set::node_type spare;
  };

  std::mutex mutex_;
  std::size_t free_;
  Kept<std::pair<int, std::uint64_t>> sends_;  // that have not ended
  Kept<std::uint64_t> lacking_;                // of each tag the first that has no place
};

}  // namespace pycollective
