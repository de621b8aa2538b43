// Ranks of the world and members of a host: two types; and what is counted by ranks holds more of
// them than a host has.
#include <cstdio>
#include <numeric>
#include <type_traits>

#include "engine/group.h"
#include "engine/operations/arrival.h"
#include "engine/shards.h"
#include "engine/task.h"
#include "tests/calls.h"
#include "tests/check.h"

using namespace pycollective;
using pycollective::testing::failure_of;

namespace {

// Neither stands for the other by accident.
static_assert(!std::is_convertible_v<int, Member> && !std::is_convertible_v<Member, int>);
static_assert(!std::is_invocable_v<decltype(&Group::mailbox), const Group&, int>);
static_assert(!std::is_invocable_v<decltype(&Group::rank_of), const Group&, int>);
static_assert(!std::is_invocable_v<decltype(&Group::member_of), const Group&, Member>);
static_assert(!std::is_invocable_v<decltype(&bit), int>);
// As many as Python lets join (pycollective/config.py).
static_assert(kMaxMembers == 64 && kCountableRanks >= 4096);

Request request_of(OpKind kind, std::size_t count) {
  Request request;
  request.kind = kind;
  request.dtype = Dtype::kFloat32;
  request.count = count;
  return request;
}

// Shards one behind the other, each as long as `length` says.
template <class Length>
void check_shards(const Shards& shards, int number, const Length& length) {
  std::size_t begin = 0;
  std::size_t longest = 0;
  for (int s = 0; s < number; ++s) {
    CHECK(shards.begin(s) == begin && shards.length(s) == length(s, begin));
    const Range part = shards.part(s, 1, 48);
    CHECK(part.begin == begin + std::min<std::size_t>(48, shards.length(s)));
    CHECK(part.length == std::min<std::size_t>(48, shards.length(s) - (part.begin - begin)));
    begin += shards.length(s);
    longest = std::max(longest, shards.length(s));
  }
  CHECK(shards.longest() == longest);
}

void shards_of_any_number_of_ranks() {
  for (const int ranks : {1, 3, 64, 65, 4096, kCountableRanks})
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000003}}) {
      const auto n = static_cast<std::size_t>(ranks);
      const std::size_t equal = ((count + n - 1) / n + 15) / 16 * 16;  // whole lines of fp32
      const auto cut = [&](int, std::size_t begin) { return std::min(equal, count - begin); };
      check_shards(Shards::cut(count, ranks, Dtype::kFloat32), ranks, cut);
      check_shards(Shards(request_of(OpKind::kAllReduce, count), ranks), ranks, cut);
      check_shards(Shards(request_of(OpKind::kAllGather, count), ranks), ranks,
                   [&](int, std::size_t) { return count; });
      Request broadcast = request_of(OpKind::kBroadcast, count);
      broadcast.root = ranks / 2;
      check_shards(Shards(broadcast, ranks), ranks,
                   [&](int s, std::size_t) { return s == ranks / 2 ? count : 0; });
      Request uneven = request_of(OpKind::kGather, 0);
      for (int r = 0; r < ranks; ++r)
        uneven.counts.push_back(r % 3 == 1 ? 0 : count + static_cast<std::size_t>(r));
      check_shards(Shards(uneven, ranks), ranks,
                   [&](int s, std::size_t) { return uneven.counts[static_cast<std::size_t>(s)]; });
    }
}

void a_call_travels_with_any_root() {
  for (const int root : {0, 255, 4096, kCountableRanks - 1}) {
    Request request = request_of(OpKind::kBroadcast, 7);
    request.root = root;
    const CallSignature mine = signature_of(Task(request));
    CHECK(describe(mine) == "broadcast(float32, count 7, root " + std::to_string(root) + ")");
    request.root = root ^ 1;
    CHECK(!agree(signature_of(Task(request)), mine));
  }
}

// Also such that their product or sum would wrap to something small.
void counts_beyond_memory_are_refused() {
  float x[4] = {};
  Request request = request_of(OpKind::kAllGather, std::size_t{1} << 62);
  request.input = request.output = x;
  CHECK(failure_of([&] { validate(request, 0, 4); }).kind == FailureKind::kConfiguration);
  request.counts = {std::size_t{1} << 63, 0, std::size_t{1} << 63, 0};
  CHECK(failure_of([&] { validate(request, 1, 4); }).kind == FailureKind::kConfiguration);
}

// A group whose members are not ascending ranks is none; nor one with more ranks than there can be.
void worlds_that_make_no_sense_are_refused() {
  const auto node = std::make_shared<Node>();
  const auto attempt = [&](std::vector<int> local_ranks, int size) {
    World world;
    world.rank = local_ranks.front();
    world.size = size;
    world.local_ranks = std::move(local_ranks);
    const MailboxRange mailbox = node->allocate_mailbox(static_cast<int>(world.local_ranks.size()));
    const std::vector<Token> tokens(world.local_ranks.size(), node->token());
    const std::vector<std::size_t> offsets(world.local_ranks.size(), mailbox.offset);
    try {
      Group(node, Member(0), tokens, offsets, mailbox, mailbox.data_bytes, std::move(world));
    } catch (const std::invalid_argument&) {
      return false;
    }
    return true;
  };
  CHECK(attempt({0}, 1));
  CHECK(attempt({0, 1}, 2));
  CHECK(!attempt({1, 0}, 2));
  CHECK(!attempt({0, 0}, 2));
  CHECK(!attempt({0, 2}, 2));
  CHECK(!attempt({-1, 0}, 2));
  CHECK(!attempt({0}, kCountableRanks + 1));
}

}  // namespace

int main() {
  shards_of_any_number_of_ranks();
  a_call_travels_with_any_root();
  counts_beyond_memory_are_refused();
  worlds_that_make_no_sense_are_refused();
  std::puts("ranks: passed");
}
