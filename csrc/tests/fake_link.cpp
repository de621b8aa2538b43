#include "tests/fake_link.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <iterator>
#include <list>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tests/check.h"

namespace pycollective::testing {
namespace {

using Transfer = Link::Transfer;
using Outcome = Link::Outcome;

struct Message {
  Transfer transfer;        // of its sender
  const std::byte* memory;  // the sender's, while it has not been read
  std::vector<std::byte> data;
  std::size_t bytes;
  std::uint64_t due;
};

struct Posted {
  Transfer transfer;
  std::byte* memory;
  std::size_t capacity;
};

void drop_empty(std::map<std::pair<int, int>, std::list<Message>>& wires) {
  for (auto wire = wires.begin(); wire != wires.end();)
    wire = wire->second.empty() ? wires.erase(wire) : std::next(wire);
}

}  // namespace

struct FakeNetwork::Station {
  using Key = std::pair<int, int>;
  std::mutex mutex;
  std::mt19937 random;
  std::uint64_t now = 0;  // calls of progress()
  // None is empty: with a thousand ranks it is these that are looked through, and that take memory.
  std::map<Key, std::list<Message>> wires;  // by sender and lane
  std::map<Key, std::list<Posted>> posted;  // by sender, or any, and lane
  std::unordered_map<Transfer, Outcome> ended;
  std::deque<Link::Loss> losses;
  std::set<int> lost;
  std::function<void()> wake;
  Transfer next = 1;
  std::uint64_t delivered = 0;
  bool dead = false;
};

class FakeNetwork::End final : public Link {
 public:
  End(FakeNetwork& network, int rank) : network_(network), rank_(rank) {}

  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool) override {
    Station& own = at(rank_);
    Station& theirs = at(rank);
    const auto* memory = static_cast<const std::byte*>(data);
    Transfer transfer = 0;
    bool late = false;
    std::uint64_t delay = 0;
    {
      const std::lock_guard lock(own.mutex);
      transfer = own.next++;
      if (own.dead || own.lost.count(rank) != 0) {
        own.ended[transfer] = Outcome::kLost;
        return transfer;
      }
      late = memory != nullptr && ((network_.manner_.reads_late && own.random() % 2 == 0) ||
                                   (network_.manner_.meets && lane == kLaneControl));
      if (!late) own.ended[transfer] = Outcome::kDone;
      delay = own.random() % (static_cast<unsigned>(network_.manner_.longest_delay) + 1);
    }
    Message message{transfer, late ? memory : nullptr, {}, bytes, 0};
    if (!late && bytes != 0) message.data.assign(memory, memory + bytes);
    std::function<void()> wake;
    {
      const std::lock_guard lock(theirs.mutex);
      message.due = theirs.now + delay;
      theirs.wires[{rank_, lane}].push_back(std::move(message));
      wake = theirs.wake;
    }
    if (wake) wake();
    return transfer;
  }

  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override {
    Station& own = at(rank_);
    const std::lock_guard lock(own.mutex);
    const Transfer transfer = own.next++;
    own.posted[{rank, lane}].push_back({transfer, static_cast<std::byte*>(data), capacity});
    return transfer;
  }

  void progress() override { network_.deliver(rank_); }

  Outcome test(Transfer transfer) override {
    Station& own = at(rank_);
    const std::lock_guard lock(own.mutex);
    const auto found = own.ended.find(transfer);
    if (found == own.ended.end()) return Outcome::kUnderWay;
    const Outcome outcome = found->second;
    own.ended.erase(found);
    return outcome;
  }

  void cancel(Transfer transfer) noexcept override {
    if (!network_.manner_.cancels) return;
    Station& own = at(rank_);
    {
      const std::lock_guard lock(own.mutex);
      for (auto& [key, posts] : own.posted)
        for (auto post = posts.begin(); post != posts.end(); ++post)
          if (post->transfer == transfer) {
            posts.erase(post);
            if (posts.empty()) own.posted.erase(key);
            own.ended[transfer] = Outcome::kCancelled;
            return;
          }
    }
    for (std::size_t r = 0; r < network_.stations_.size(); ++r) {
      Station& theirs = *network_.stations_[r];
      bool found = false;
      {
        const std::lock_guard lock(theirs.mutex);
        for (auto& [key, wire] : theirs.wires)
          for (auto message = wire.begin(); key.first == rank_ && message != wire.end(); ++message)
            if (message->memory != nullptr && message->transfer == transfer) {
              wire.erase(message);
              found = true;
              break;
            }
        drop_empty(theirs.wires);
      }
      if (!found) continue;
      const std::lock_guard lock(own.mutex);
      own.ended[transfer] = Outcome::kCancelled;
      return;
    }
  }

  std::optional<Loss> lost() override {
    Station& own = at(rank_);
    const std::lock_guard lock(own.mutex);
    if (own.losses.empty()) return std::nullopt;
    Loss loss = std::move(own.losses.front());
    own.losses.pop_front();
    return loss;
  }

  bool wake_with(std::function<void()> wake) override {
    Station& own = at(rank_);
    const std::lock_guard lock(own.mutex);
    if (network_.manner_.longest_delay > 0) return false;  // when it may be delivered wakes nobody
    own.wake = std::move(wake);
    return true;
  }

  void close(bool) noexcept override {
    const std::lock_guard lock(at(rank_).mutex);
    at(rank_).wake = nullptr;
  }

 private:
  Station& at(int rank) { return *network_.stations_[static_cast<std::size_t>(rank)]; }

  FakeNetwork& network_;
  const int rank_;
};

FakeNetwork::FakeNetwork(int ranks, Manner manner) : manner_(manner) {
  for (int r = 0; r < ranks; ++r) {
    stations_.push_back(std::make_unique<Station>());
    stations_.back()->random.seed(manner.seed * 4099 + static_cast<unsigned>(r));
  }
}

FakeNetwork::~FakeNetwork() = default;

std::shared_ptr<Link> FakeNetwork::link(int rank) { return std::make_shared<End>(*this, rank); }

void FakeNetwork::deliver(int rank) {
  Station& own = *stations_[static_cast<std::size_t>(rank)];
  std::vector<std::pair<int, Transfer>> read;  // of senders whose memory was read late
  {
    const std::lock_guard lock(own.mutex);
    ++own.now;
    for (auto each = own.wires.begin(); each != own.wires.end();) {
      const auto [sender, lane] = each->first;
      std::list<Message>& wire = each->second;
      while (!wire.empty() && wire.front().due <= own.now && lane < held_from_) {
        auto posts = own.posted.find(each->first);
        if (posts == own.posted.end()) posts = own.posted.find({Link::kAnyRank, lane});
        if (posts == own.posted.end()) break;
        const Message& message = wire.front();
        const Posted post = posts->second.front();
        const bool fits = message.bytes <= post.capacity;
        CHECK(fits || !manner_.fits);  // what Gloo answers with the end of the process
        const std::byte* from = message.memory ? message.memory : message.data.data();
        if (message.bytes != 0 && fits) std::memcpy(post.memory, from, message.bytes);
        if (spoil_ && fits && lane >= kLaneFirst) spoil_(sender, rank, post.memory, message.bytes);
        if (message.memory != nullptr) read.emplace_back(sender, message.transfer);
        own.ended[post.transfer] = fits ? Outcome::kDone : Outcome::kLost;
        if (!fits) own.losses.push_back({sender, "it sent more than is awaited"});
        ++own.delivered;
        wire.pop_front();
        posts->second.pop_front();
        if (posts->second.empty()) own.posted.erase(posts);
      }
      each = wire.empty() ? own.wires.erase(each) : std::next(each);
    }
    for (auto each = own.posted.begin(); !own.lost.empty() && each != own.posted.end();) {
      if (own.lost.count(each->first.first) == 0 || own.wires.count(each->first) != 0) {
        ++each;
        continue;
      }
      for (const Posted& post : each->second) own.ended[post.transfer] = Outcome::kLost;
      each = own.posted.erase(each);
    }
  }
  for (const auto& [sender, transfer] : read) {
    Station& theirs = *stations_[static_cast<std::size_t>(sender)];
    const std::lock_guard lock(theirs.mutex);
    theirs.ended[transfer] = Outcome::kDone;
  }
}

void FakeNetwork::hold_from(int first) { held_from_ = first; }

void FakeNetwork::kill(int rank, bool loses) {
  std::vector<std::pair<std::size_t, Transfer>> never_read;
  for (std::size_t r = 0; r < stations_.size(); ++r) {
    Station& each = *stations_[r];
    const std::lock_guard lock(each.mutex);
    if (static_cast<int>(r) == rank) {
      each.dead = true;
      for (auto& [key, wire] : each.wires)
        for (const Message& message : wire)
          if (message.memory != nullptr)
            never_read.emplace_back(static_cast<std::size_t>(key.first), message.transfer);
      each.wires.clear();
      for (auto& [key, posts] : each.posted)
        for (const Posted& post : posts) each.ended[post.transfer] = Outcome::kLost;
      each.posted.clear();
      continue;
    }
    each.lost.insert(rank);
    each.losses.push_back({rank, "its connection was closed"});
    for (auto& [key, wire] : each.wires) {
      if (key.first != rank || (!loses && !manner_.meets)) continue;
      std::size_t kept = each.random() % (wire.size() + 1);
      // Its memory is gone: what was not read is lost.
      std::size_t i = 0;
      for (const Message& message : wire) {
        if (message.memory != nullptr) kept = std::min(kept, i);
        ++i;
      }
      while (wire.size() > kept) wire.pop_back();
    }
    drop_empty(each.wires);
    if (each.wake) each.wake();
  }
  for (const auto& [sender, transfer] : never_read) {
    const std::lock_guard lock(stations_[sender]->mutex);
    stations_[sender]->ended[transfer] = Outcome::kLost;
  }
}

std::size_t FakeNetwork::posted(int rank) const {
  Station& own = *stations_[static_cast<std::size_t>(rank)];
  const std::lock_guard lock(own.mutex);
  std::size_t sum = 0;
  for (const auto& [key, posts] : own.posted) sum += posts.size();
  return sum;
}

std::uint64_t FakeNetwork::delivered() const {
  std::uint64_t sum = 0;
  for (const auto& each : stations_) {
    const std::lock_guard lock(each->mutex);
    sum += each->delivered;
  }
  return sum;
}

}  // namespace pycollective::testing
