// A member of a group that shares memory on one host, as opposed to a rank of a communicator, which
// may be on any host and is an `int`. Masks, mailboxes, segments and processes belong to members;
// what a user sees or gives, roots and messages belong to ranks. Group::rank_of and
// Group::member_of lead from one to the other, and nothing else does.
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
