// As many blocks that wait as the library ever has on a GPU: four ranks that share it, each with
// the quarter of what fits. Do they all fit at once, and end?
//
//   resident_limit [rounds, 20]
//
// Run in csrc/tests. Each round three ranks launch; each of their blocks tells the fourth rank that
// it is there, and waits for it. Once all have told, all are on the GPU together: then the fourth
// launches, and all must end with the bits of the CPU's kernels. Then five ranks with a quarter
// each, which is one too many: that their waits end by the deadline, and that the GPU works on, is
// what else there is to see. Prints a line of JSON; status 1 where it was otherwise.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "peer_calls.h"

namespace pycollective::testing {
namespace {

constexpr std::size_t kBlockCount = 4096;          // elements of a block
constexpr double kSoon = 20;                       // seconds
constexpr std::uint64_t kTooLong = 1'000'000'000;  // nanoseconds

// Blocks of these ranks that have told the rank `absent` of data in its chunk `epoch`.
unsigned told(DeviceRanks& ranks, int absent, unsigned blocks, std::uint32_t epoch) {
  const Rank& to = ranks.at(absent);
  const Current current(to.device->context);
  const std::size_t bytes = blocks * cuda::kMailboxLine;
  Data flags(bytes);
  OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(flags.data()),
                            to.mailbox + cuda::flags_at(0), bytes, to.stream));
  OK(driver().cuStreamSynchronize(to.stream));
  unsigned count = 0;
  for (unsigned b = 0; b < blocks; ++b)
    for (int r = 0; r < ranks.size(); ++r) {
      std::uint32_t mark = 0;
      std::memcpy(&mark, flags.data() + b * cuda::kMailboxLine + 4 * static_cast<unsigned>(r), 4);
      if (r != absent && cuda::has_come(mark, cuda::mark_of(epoch, 1))) ++count;
    }
  return count;
}

// As many as `wanted`, in time; else what there were.
unsigned told_in_time(DeviceRanks& ranks, int absent, unsigned blocks, std::uint32_t epoch,
                      unsigned wanted, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const unsigned now = told(ranks, absent, blocks, epoch);
    if (now >= wanted || std::chrono::steady_clock::now() >= end) return now;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct Limit {
  Devices devices;
  Random random{1};
  const int fit = devices.at(0).kernels->program(Dtype::kFloat32, ReduceOp::kSum).blocks;
  const unsigned quarter = static_cast<unsigned>(std::max(fit / 4, 1));

  DeviceRanks group(int n) {
    return DeviceRanks(devices, n, {quarter, PeerMemory::kUsualSlot}, memory(), true);
  }
  Call call(int n) const { return call_of(one_shot(n), Dtype::kFloat32, kBlockCount * quarter); }
  std::size_t memory() const { return 8 * kBlockCount * quarter + 4096; }
};

// Blocks that waited at once.
unsigned at_the_limit(Limit& limit, int rounds) {
  const int n = 4;
  const unsigned wanted = (n - 1) * limit.quarter;
  DeviceRanks ranks = limit.group(n);
  Placed call(limit.call(n), 0, limit.random);
  unsigned fewest = wanted;
  for (int round = 0; round < rounds; ++round) {
    call.draw(limit.random);
    call.write(ranks);
    const int last = round % n;
    for (int r = 0; r < n; ++r)
      if (r != last) call.launch(ranks.at(r), r, kLongestWait);
    // Each launch is one chunk of each block.
    fewest = std::min(fewest, told_in_time(ranks, last, limit.quarter,
                                           static_cast<std::uint32_t>(round), wanted, kSoon / 4));
    call.launch(ranks.at(last), last, kLongestWait);
    ranks.synchronize(kSoon);
    ranks.check_no_endings();
    call.check(ranks);
  }
  return fewest;
}

// Ranks whose waits have ended by the deadline.
int beyond_the_limit(Limit& limit) {
  const int n = 5;
  DeviceRanks ranks = limit.group(n);
  const Placed call(limit.call(n), 0, limit.random);
  call.write(ranks);
  for (int r = 0; r < n; ++r) call.launch(ranks.at(r), r, kTooLong);
  ranks.synchronize(kSoon);
  int ended = 0;
  for (int r = 0; r < n; ++r)
    if (const auto ending = ranks.at(r).peers->ending()) {
      CHECK(ending->why == cuda::Ending::kTimeout);
      ++ended;
    }
  return ended;
}

}  // namespace
}  // namespace pycollective::testing

int main(int count, char** arguments) {
  using namespace pycollective::testing;
  const int rounds = count > 1 ? std::atoi(arguments[1]) : 20;
  CHECK(rounds > 0);
  Limit limit;
  const Current current(limit.devices.at(0).context);
  const unsigned waited = at_the_limit(limit, rounds);
  const int ended = beyond_the_limit(limit);
  at_the_limit(limit, 1);  // all works on
  std::printf(
      "{\"blocks_that_fit\": %d, \"ranks\": 4, \"blocks_of_a_rank\": %u, \"waited_at_once\": %u, "
      "\"rounds\": %d, \"five_ranks_ended_by_deadline\": %d}\n",
      limit.fit, limit.quarter, waited, rounds, ended);
  return waited == 3 * limit.quarter ? 0 : 1;
}
