// all_to_all_v: a message for each pair of ranks.
#include <cstdio>
#include <string>

#include "tests/check.h"
#include "tests/messages.h"

using namespace pycollective;
using namespace pycollective::testing;

namespace {

// How many elements a rank sends to another: none, or more than a channel holds.
std::size_t part(int from, int to, unsigned seed) {
  constexpr std::size_t kParts[] = {0, 1, 300, 2100, 9001, 20000};
  return kParts[(static_cast<unsigned>(from * 5 + to * 3) + seed) % std::size(kParts)];
}

struct Uneven {
  Uneven(int rank, int ranks, unsigned seed) : sent(ranks), got(ranks) {
    auto parts = std::make_shared<std::vector<AllToAllVPart>>();
    for (int peer = 0; peer < ranks; ++peer) {
      auto& out = sent[static_cast<std::size_t>(peer)];
      auto& in = got[static_cast<std::size_t>(peer)];
      out = message(rank, peer, 1, static_cast<int>(seed), part(rank, peer, seed));
      in.assign(part(peer, rank, seed), -1.0F);
      parts->push_back({out.data(), out.size(), in.data(), in.size()});
    }
    all_to_all_v = parts;
    request.kind = OpKind::kAllToAll;
    request.dtype = Dtype::kFloat32;
    request.all_to_all_v = parts;
  }
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> got;
  std::shared_ptr<std::vector<AllToAllVPart>> all_to_all_v;
  Request request;
};

void uneven_all_to_all() {
  everywhere(4, [](Communicator& comm, int rank) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      Uneven first(rank, 4, seed);
      Uneven second(rank, 4, seed + 1);
      const auto work = comm.submit(first.request, nullptr);
      comm.run(second.request, {});
      CHECK(work->wait(30, {}));
      for (int peer = 0; peer < 4; ++peer) {
        const auto at = static_cast<std::size_t>(peer);
        CHECK(first.got[at] ==
              message(peer, rank, 1, static_cast<int>(seed), first.got[at].size()));
        CHECK(second.got[at] ==
              message(peer, rank, 1, static_cast<int>(seed) + 1, second.got[at].size()));
      }
    }
  });
}

void uneven_parts_that_do_not_fit() {
  everywhere(3, [](Communicator& comm, int rank) {
    Uneven all(rank, 3, 2);
    if (rank == 2) {
      all.got[1].resize(all.got[1].size() + 3);
      (*all.all_to_all_v)[1].output = all.got[1].data();
      (*all.all_to_all_v)[1].recv_count += 3;
    }
    const auto start = std::chrono::steady_clock::now();
    const Failure failure = failure_of([&] { comm.run(all.request, {}); });
    if (rank == 0 && failure.kind == FailureKind::kNone) return;  // its own parts fit
    CHECK(failure.kind == FailureKind::kMismatch);
    CHECK(contains(failure.message, "all_to_all_single"));
    CHECK(contains(failure.message, "rank 1"));
    CHECK(contains(failure.message,
                   "sends " + std::to_string(part(1, 2, 2)) + " elements of float32 to rank 2"));
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(10));
  });
}

// Outputs must not overlap other parts: refused, nothing moves, and the next call works.
void parts_that_overlap() {
  const ThreadGroup group(3, 20);
  group.run([&](int r) {
    Communicator& comm = *group[r];
    std::vector<float> memory(400, 1.0F);
    struct Case {
      int input, first, second;  // where rank 0's input and the outputs of ranks 1 and 2 lie
      const char* said;
    };
    for (const Case& each :
         {Case{300, 0, 100, ""}, Case{200, 100, 0, ""}, Case{0, 200, 100, ""},
          Case{300, 0, 99, "two outputs overlap"}, Case{0, 200, 200, "two outputs overlap"},
          Case{199, 0, 100, "an input and an output overlap"},
          Case{99, 0, 200, "an input and an output overlap"},
          Case{100, 0, 100, "an input and an output overlap"}}) {
      Exchanged all(r, 3, 100);
      auto parts = *all.request.all_to_all_v;
      parts[0].input = memory.data() + each.input;
      parts[1].output = memory.data() + each.first;
      parts[2].output = memory.data() + each.second;
      all.request.all_to_all_v =
          std::make_shared<const std::vector<AllToAllVPart>>(std::move(parts));
      const Failure failure = failure_of([&] { comm.run(all.request, {}); });
      const bool refused = each.said[0] != 0;
      CHECK(failure.kind == (refused ? FailureKind::kConfiguration : FailureKind::kNone));
      CHECK(contains(failure.message, each.said));
    }
    // Only a rank's own part may be in place.
    Exchanged all(r, 3, 100);
    auto parts = *all.request.all_to_all_v;
    const auto own = static_cast<std::size_t>(r);
    parts[own].output = all.sent[own].data();
    all.request.all_to_all_v = std::make_shared<const std::vector<AllToAllVPart>>(parts);
    comm.run(all.request, {});
    CHECK(all.sent[own] == message(r, r, 1, 0, 100));
    parts[own].output = all.sent[(own + 1) % 3].data();
    all.request.all_to_all_v = std::make_shared<const std::vector<AllToAllVPart>>(parts);
    const Failure failure = failure_of([&] { comm.run(all.request, {}); });
    CHECK(contains(failure.message, "an input and an output overlap"));
  });
}

// One rank calls all_to_all, another all_to_all_v: a mismatch.
void equal_parts_meet_uneven_ones() {
  const ThreadGroup group(3, 20);
  group.run([&](int r) {
    Uneven all(r, 3, 0);
    std::vector<float> x(30);
    std::vector<float> y(30);
    if (r == 1) {
      all.request.all_to_all_v = nullptr;
      all.request.input = x.data();
      all.request.output = y.data();
      all.request.count = 10;
    }
    const Failure failure = failure_of([&] { group[r]->run(all.request, {}); });
    CHECK(failure.kind == FailureKind::kMismatch);
    CHECK(contains(failure.message, "uneven counts"));
  });
}

}  // namespace

int main() {
  uneven_all_to_all();
  uneven_parts_that_do_not_fit();
  parts_that_overlap();
  equal_parts_meet_uneven_ones();
  std::puts("all_to_all_v: passed");
  return 0;
}
