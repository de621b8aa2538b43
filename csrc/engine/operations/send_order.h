// Which sends to one peer may begin, if more wait than there are places.
//
// Messages with one tag follow each other. For each tag, the oldest send without a place competes
// for one, even while an earlier send of the tag that needs no place is under way. The oldest of
// the competing sends get the free places. So as long as the peer leaves messages of fewer tags
// unreceived than there are places, it can receive any other message. If places went to whichever
// send looks first, later sends could hold them all, and a receive that comes before theirs would
// wait for ever. (The price: a place stays free while its send waits for an earlier one of its
// tag.)
//
// A call costs the logarithm of the number of waiting sends. A waiting send looks at no more
// entries than there are places. Sends one after another allocate nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <set>
#include <utility>

namespace pycollective {

// The sends that need a place, from call to end, by tag and number; numbers grow with the calls.
// Thread-safe, with a lock of its own: call() runs under the communicator's lock, and must not wait
// for data to be copied or sent.
class SendOrder {
 public:
  explicit SendOrder(std::size_t places) : free_(places) {}

  // Adds a send. In the order of the calls.
  void call(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto at = sends_.put({tag, number});
    if (at == sends_.all.begin() || std::prev(at)->first != tag) lacking_.put(number);
  }
  // For the oldest send of its tag. False while the free places belong to older sends.
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
  // Frees the place of a send. The next one of its tag competes from then on.
  void end(int tag, std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    ++free_;
    const auto next = sends_.take(sends_.all.find({tag, number}));
    if (next != sends_.all.end() && next->first == tag) lacking_.put(next->second);
  }

 private:
  // A set that reuses the memory of the element taken last for the next one put.
  template <class Value>
  struct Kept {
    using Set = std::set<Value>;
    typename Set::iterator put(const Value& value) {
      if (spare.empty()) return all.insert(value).first;
      spare.value() = value;
      return all.insert(std::move(spare)).position;
    }
    // Removes the element at `at`, if any. Returns the one behind it.
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
  Kept<std::uint64_t> lacking_;                // for each tag, the oldest send without a place
};

}  // namespace pycollective
