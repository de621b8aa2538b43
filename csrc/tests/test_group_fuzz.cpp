// A group is made of what a store says of its members: where their mailboxes lie, and how long
// their data areas are. Whatever it says, the group is refused, or all that it may touch lies in
// mailboxes that their owners have made. All of that is touched, with ASan as the judge.
//
//   test_group_fuzz [seconds] [seed]
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "engine/group.h"
#include "tests/check.h"
#include "tests/inside.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Random = std::mt19937_64;

constexpr int kMost = 4;

std::uint64_t below(Random& random, std::uint64_t end) { return random() % end; }

// Near what may pass, near where sums wrap, or anything.
std::size_t number(Random& random, std::size_t right) {
  const std::size_t near[] = {
      right, 0, kPage, kSegmentBytes, ~std::size_t{0}, std::size_t{1} << 63};
  const std::size_t base = near[below(random, std::size(near))];
  switch (below(random, 5)) {
    case 0:
      return base + kPage * below(random, 600);
    case 1:
      return base - kPage * below(random, 600);
    case 2:
      return base + below(random, 2 * kPage);
    case 3:
      return random();
    default:
      return base;
  }
}

struct Table {
  std::vector<Token> tokens;
  std::vector<std::size_t> offsets;
  std::size_t data_bytes;
};

// Of a process: the mailboxes that it has made for a group of so many members.
class Made {
 public:
  explicit Made(const std::shared_ptr<Node>& node) : node_(node) {
    for (int size = 1; size <= kMost; ++size) allocate(size);
  }
  const MailboxRange& of(int size) const { return ranges_[static_cast<std::size_t>(size)]; }
  void allocate(int size) {
    ranges_[static_cast<std::size_t>(size)] = node_->allocate_mailbox(size);
  }

 private:
  std::shared_ptr<Node> node_;
  MailboxRange ranges_[kMost + 1];
};

void spoil(Random& random, Table& table) {
  for (std::uint64_t changes = below(random, 3); changes > 0; --changes) {
    const std::size_t row = below(random, table.tokens.size());
    switch (below(random, 6)) {
      case 0:
        table.tokens[row] = {random(), random()};
        break;
      case 1:
        table.tokens[row] = table.tokens[below(random, table.tokens.size())];
        break;
      case 2:
        table.data_bytes = number(random, table.data_bytes);
        break;
      case 3:
        if (below(random, 2) == 0) table.offsets.pop_back();
        break;
      default:
        table.offsets[row % table.offsets.size()] = number(random, table.offsets[0]);
    }
    if (table.offsets.empty()) return;
  }
}

// What the group may touch of its members' memory: read it all, and write where it writes.
void touch(const Group& group) {
  std::uint64_t sum = 0;
  for (const Member each : group.members()) {
    const std::byte* data = group.data(each);
    for (std::size_t i = 0; i < group.data_bytes(); i += 64)
      sum += static_cast<std::uint64_t>(data[i]);
    sum += static_cast<std::uint64_t>(data[group.data_bytes() - 1]);
    for (const Member peer : group.members())
      sum += group.sending_half(each, peer).buffer + group.receiving_half(each, peer).count;
  }
  CHECK(sum == 0);  // as allocated
}

}  // namespace

int main(int arguments, char** argument) {
  const double seconds = arguments > 1 ? std::atof(argument[1]) : 2;
  const std::uint64_t seed = arguments > 2 ? std::strtoull(argument[2], nullptr, 10) : 1;
  Random random(seed);
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<Made> made;
  for (int i = 0; i < kMost; ++i) nodes.push_back(std::make_shared<Node>());
  for (const auto& one : nodes) {
    made.emplace_back(one);
    for (const auto& other : nodes)
      if (one != other) Inside::attach(*one, *other);
  }
  long refused = 0;
  long taken = 0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < until) {
    const int size = 1 + static_cast<int>(below(random, kMost));
    const int me = static_cast<int>(below(random, static_cast<std::uint64_t>(size)));
    const auto mine = static_cast<std::size_t>(me);
    Table table;
    table.data_bytes = ~std::size_t{0};
    for (int m = 0; m < size; ++m) {
      const MailboxRange& range = made[static_cast<std::size_t>(m)].of(size);
      table.tokens.push_back(nodes[static_cast<std::size_t>(m)]->token());
      table.offsets.push_back(range.offset);
      table.data_bytes = std::min(table.data_bytes, range.data_bytes);
    }
    spoil(random, table);
    const int as = static_cast<int>(below(random, 20)) == 0 ? me - 1 + 2 * size : me;
    try {
      Group group(nodes[mine], Member(as), table.tokens, table.offsets, made[mine].of(size),
                  table.data_bytes);
      CHECK(as == me && table.offsets.size() == table.tokens.size());
      for (const Member each : group.members()) {
        bool found = false;
        for (std::size_t owner = 0; owner < nodes.size(); ++owner) {
          const MailboxRange& range = made[owner].of(size);
          found = found || (nodes[owner]->token() == table.tokens[each.at()] &&
                            range.offset == table.offsets[each.at()] &&
                            group.data_bytes() <= range.data_bytes);
        }
        CHECK(found);
      }
      touch(group);
      // All others have left, so that the memory serves again.
      group.own().left = group.own().unmapped = ~Mask{0};
      ++taken;
    } catch (const std::invalid_argument&) {
      ++refused;
      continue;
    }
    made[mine].allocate(size);
  }
  CHECK(taken > 0 && refused > taken / 4);
  std::printf("group fuzz: passed (seed %llu: %ld refused, %ld taken)\n",
              static_cast<unsigned long long>(seed), refused, taken);
}
