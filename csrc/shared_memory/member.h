// A member of a group that shares memory on one host. A rank of a communicator, in contrast, may be
// on any host and is an `int`. Masks, mailboxes, segments and processes belong to members. Roots,
// messages and all numbers that a user sees belong to ranks. Only Group::rank_of and
// Group::member_of convert between the two.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycollective {

constexpr int kMaxMembers = 64;  // the width of a mask

class Member {
 public:
  constexpr Member() = default;
  constexpr explicit Member(int index) : index_(index) {}
  constexpr int index() const { return index_; }
  constexpr std::size_t at() const { return static_cast<std::size_t>(index_); }  // in an array
  friend constexpr bool operator==(Member a, Member b) { return a.index_ == b.index_; }
  friend constexpr bool operator!=(Member a, Member b) { return a.index_ != b.index_; }

 private:
  std::int32_t index_ = 0;
};

// All of a group, for loops.
class Members {
 public:
  class Iterator {
   public:
    constexpr explicit Iterator(int index) : index_(index) {}
    constexpr Member operator*() const { return Member(index_); }
    constexpr Iterator& operator++() {
      ++index_;
      return *this;
    }
    constexpr bool operator!=(const Iterator& other) const { return index_ != other.index_; }

   private:
    int index_;
  };
  constexpr explicit Members(int size) : size_(size) {}
  constexpr Iterator begin() const { return Iterator(0); }
  constexpr Iterator end() const { return Iterator(size_); }

 private:
  int size_;
};

}  // namespace pycollective
