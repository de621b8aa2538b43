// Messages that tests send, and where: on one host and between hosts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tests/calls.h"
#include "tests/host_ranks.h"

namespace pycollective::testing {

using Body = std::function<void(Communicator&, int rank)>;

inline Request tagged(OpKind kind, std::vector<float>& x, int peer, int tag) {
  Request request = pair(kind, x, peer);
  request.tag = tag;
  return request;
}

// The message number `turn` of a tag from one rank to another.
inline std::vector<float> message(int from, int to, int tag, int turn, std::size_t count) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i)
    x[i] = static_cast<float>(from * 1000 + to * 100 + tag * 7 + turn * 13) + 0.5F * (i % 64);
  return x;
}

// An uneven all-to-all in which each rank sends each `count` elements, and is sent as many.
struct Exchanged {
  Exchanged(int own, int ranks, std::size_t count) : rank(own), sent(ranks), got(ranks) {
    auto parts = std::make_shared<std::vector<AllToAllVPart>>();
    for (int peer = 0; peer < ranks; ++peer) {
      const auto at = static_cast<std::size_t>(peer);
      sent[at] = message(rank, peer, 1, 0, count);
      got[at].assign(count, -1.0F);
      parts->push_back({sent[at].data(), count, got[at].data(), count});
    }
    request.kind = OpKind::kAllToAll;
    request.dtype = Dtype::kFloat32;
    request.all_to_all_v = std::move(parts);
  }
  bool is_right() const {
    for (std::size_t peer = 0; peer < got.size(); ++peer)
      if (got[peer] != message(static_cast<int>(peer), rank, 1, 0, got[peer].size())) return false;
    return true;
  }
  int rank;
  std::vector<std::vector<float>> sent;
  std::vector<std::vector<float>> got;
  Request request;
};

// On one host, between hosts that do not ring, and with some of each. `progress`: whether there is
// a progress thread.
inline void everywhere(int ranks, const Body& body, double timeout = 30, bool progress = true) {
  const auto all = [&](const auto& group) {
    if (!progress) group.stop_progress();
    group.run([&](int r) { body(*group[r], r); });
    group.run([&](int r) { group[r]->close(); });
  };
  all(ThreadGroup(ranks, timeout));
  for (const std::vector<int>& hosts :
       {std::vector<int>(static_cast<std::size_t>(ranks), 1), std::vector<int>{ranks - 1, 1}}) {
    FakeNetwork network(ranks, {5, 3, true, true});
    all(HostGroup(hosts, network, timeout));
  }
}

}  // namespace pycollective::testing
