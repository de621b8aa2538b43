// A packed message that no rank of this library sends: whoever gets it refuses it by its type, and
// every call ends.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/calls.h"
#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/internode_programs.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Length = std::uint32_t;

Length length_at(const std::byte* at) {
  Length length = 0;
  std::memcpy(&length, at, sizeof(length));
  return length;
}

// Where a message's pieces begin, with their lengths: those that are longer than a block is raw, so
// that they are packed.
std::vector<std::byte*> pieces_of(std::byte* data, std::size_t bytes) {
  std::vector<std::byte*> pieces;
  for (std::size_t at = 0; at < bytes; at += sizeof(Length) + length_at(data + at)) {
    CHECK(at + sizeof(Length) <= bytes);
    if (length_at(data + at) > 512) pieces.push_back(data + at);
  }
  return pieces;
}

struct Break {
  const char* name;
  std::function<void(std::byte* piece)> apply;
};

void set_length(std::byte* piece, Length length) { std::memcpy(piece, &length, sizeof(length)); }

const Break kBreaks[] = {
    {"none of its length", [](std::byte* piece) { set_length(piece, 0); }},
    {"one byte less", [](std::byte* piece) { set_length(piece, length_at(piece) - 1); }},
    {"one byte more", [](std::byte* piece) { set_length(piece, length_at(piece) + 1); }},
    {"more than there is room for", [](std::byte* piece) { set_length(piece, 1U << 24); }},
    {"the longest length", [](std::byte* piece) { set_length(piece, UINT32_MAX); }},
    {"a mode that is none", [](std::byte* piece) { piece[5] = std::byte{254}; }},
    {"another number of escaped", [](std::byte* piece) { piece[6] ^= std::byte{1}; }},
};

// All ranks' sum of integers, whatever the order.
Request sum_of(std::vector<std::byte>& x, std::size_t count, Dtype dtype,
               std::shared_ptr<const Program> program) {
  Request request;
  request.kind = OpKind::kAllReduce;
  request.dtype = dtype;
  request.count = count;
  request.wire = Wire::kExact;
  request.program = std::move(program);
  request.input = request.output = x.data();
  return request;
}

// Small integers, which pack well, on the heap and no byte longer.
std::vector<std::byte> integers(Dtype dtype, int rank, std::size_t count) {
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> bytes(size * count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = static_cast<float>(1 + (7 * i + static_cast<std::size_t>(rank)) % 31);
    std::byte bits[sizeof(number)];
    std::memcpy(bits, &number, sizeof(number));
    std::memcpy(bytes.data() + size * i, bits + sizeof(number) - size,
                size);  // bf16: its upper half
  }
  return bytes;
}

// Runs the call with one piece of one message broken; how many pieces that message had.
std::size_t break_one(const HostSchedule& schedule, const Break& broken, Dtype dtype, bool last,
                      unsigned seed) {
  constexpr std::size_t kCount = 20011;
  const int n = static_cast<int>(schedule.programs.size());
  FakeNetwork network(n, {seed, static_cast<int>(seed % 3), false, true});
  HostRanks ranks(schedule.host_sizes, network);
  const auto group = ranks.make_communicators(20);
  std::atomic<int> to_pass{static_cast<int>(seed % 4)};  // messages, before the one that is broken
  std::atomic<std::size_t> pieces{0};
  std::atomic<int> from{-1}, to{-1};
  network.spoil_with([&](int sender, int receiver, std::byte* data, std::size_t bytes) {
    const std::vector<std::byte*> found = pieces_of(data, bytes);
    if (found.empty() || to_pass-- != 0) return;
    broken.apply(last ? found.back() : found.front());
    from = sender;
    to = receiver;
    pieces = found.size();
  });
  std::atomic<int> refused{0};
  ranks.run([&](int r) {
    const auto at = static_cast<std::size_t>(r);
    std::vector<std::byte> x = integers(dtype, r, kCount);
    const Failure failure =
        failure_of([&] { group[at]->run(sum_of(x, kCount, dtype, schedule.programs[at]), {}); });
    if (failure.message.empty()) return;  // it needed nothing of what was broken
    CHECK(failure.kind == FailureKind::kAborted);
    CHECK(failure.op == OpKind::kAllReduce && failure.sequence == 1);
    CHECK(contains(failure.message, "rank " + std::to_string(to) + " received from rank " +
                                        std::to_string(from) + " a packed message that no rank"));
    refused += r == to;
    CHECK(group[at]->failure() != nullptr);
  });
  CHECK(refused == (pieces == 0 ? 0 : 1));  // none where there were fewer messages
  ranks.run([&](int r) { group[static_cast<std::size_t>(r)]->close(); });
  return pieces;
}

}  // namespace

// With an argument: so many-th of the breaks alone.
int main(int argc, char** argv) {
  const int stride = argc > 1 ? std::atoi(argv[1]) : 1;
  CHECK(stride > 0);
  int turn = 0, broken = 0, of_several = 0;
  std::mt19937 random(1);
  for (const HostSchedule& schedule : read_host_schedules("programs.txt", OpKind::kAllReduce))
    for (const Break& each : kBreaks) {
      if (turn++ % stride != 0) continue;
      const Dtype dtype = random() % 2 == 0 ? Dtype::kFloat32 : Dtype::kBFloat16;
      const bool last = random() % 2 == 0;
      const std::size_t pieces =
          break_one(schedule, each, dtype, last, static_cast<unsigned>(random()));
      broken += pieces != 0;
      of_several += pieces > 1;
    }
  CHECK(broken > 50 && of_several > 5);
  std::printf("internode spoiled: passed (%d messages broken, %d of several pieces)\n", broken,
              of_several);
}
