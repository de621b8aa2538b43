// A barrier that names the ranks that did not come. Every rank sends rank 0 a byte; rank 0 waits
// for them in turn, and answers once all have come: 2 (n - 1) messages of a byte. Rank 0 names the
// first late rank, or all, and aborts the group: so the ranks that wait for its answer end, too.
// The words are Gloo's, which PyTorch's users know.
//
// A group that fails ends all receives, those from late ranks, too. So the error of a receive does
// not blame the rank that it is from.
#include <algorithm>
#include <cstdio>
#include <sstream>

#include "engine/waiting_time.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/work.h"

namespace pycollective::shim {
namespace {

using Milliseconds = std::chrono::milliseconds;
using Works = std::vector<std::shared_ptr<pycollective::Work>>;

constexpr Milliseconds kGrace{1000};

WaitingTime waiting_time(Milliseconds limit) {
  return WaitingTime(WaitingTime::Seconds(limit).count());
}

std::string not_passed(const std::vector<int>& absent, Milliseconds timeout) {
  std::ostringstream said;
  said << (absent.size() == 1 ? "Rank " : "Ranks ");
  for (std::size_t i = 0; i < absent.size(); ++i) said << (i == 0 ? "" : ", ") << absent[i];
  said << " failed to pass monitoredBarrier in " << timeout.count() << " ms";
  return said.str();
}

// What rank 0 says if the group fails before all have come. `absent`: the ranks that were late
// then.
std::string cut_short(const std::vector<int>& absent, Milliseconds timeout, const Failure& cause) {
  int lost = -1;
  // The message about a lost rank names it first.
  const std::size_t at = cause.message.find("rank ");
  if (cause.kind == FailureKind::kPeerFailure && at != std::string::npos)
    std::sscanf(cause.message.c_str() + at, "rank %d", &lost);
  return (absent.empty() ? "" : not_passed(absent, timeout) + "; ") +
         (lost >= 0 ? "Rank " + std::to_string(lost) + " failed to pass monitoredBarrier: "
                    : "Rank 0 successfully reached monitoredBarrier, but received errors while "
                      "waiting for others: ") +
         cause.message;
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr int kRoot = 0;
  const auto fail = [&](FailureKind kind, const std::string& text) {
    throw CollectiveFailure({kind, rank_, OpKind::kBarrier, sequence_, text});
  };
  Milliseconds timeout = opts.timeout;
  if (timeout == c10d::kUnsetTimeout)
    timeout = std::chrono::duration_cast<Milliseconds>(
        std::chrono::duration<double>(collectives_->timeout()));
  ++sequence_;
  // Raised on every rank before any message that a later receive could take.
  if (timeout.count() <= 0)
    typed([&](const InterruptHook&) {
      fail(FailureKind::kTimeout, "Rank " + std::to_string(rank_) +
                                      " timed out in monitoredBarrier after " +
                                      std::to_string(timeout.count()) + " ms");
    });

  // The core may write here after an error has ended this call.
  const auto bytes = std::make_shared<std::vector<std::uint8_t>>(2 * size_);
  Request request;
  request.tag = kBarrierTag;
  request.dtype = Dtype::kUInt8;
  request.count = 1;
  request.keep = bytes;
  // Longer than the waits below, which know who is missing; the group's own timeout may be shorter.
  request.timeout = std::chrono::duration<double>(2 * timeout + 2 * kGrace).count();
  const auto send = [&](int to) {
    request.kind = OpKind::kSend;
    request.root = to;
    request.input = bytes->data() + to;
    request.output = nullptr;
    return collectives_->submit(request, [bytes](const Failure*) {});
  };
  const auto receive = [&](int from) {
    request.kind = OpKind::kRecv;
    request.root = from;
    request.input = nullptr;
    request.output = bytes->data() + size_ + from;
    return collectives_->submit(request, [bytes](const Failure*) {});
  };

  typed([&](const InterruptHook& interrupted) {
    if (rank_ != kRoot) {
      const std::string reached = "Rank " + std::to_string(rank_) +
                                  " successfully reached monitoredBarrier, but received errors "
                                  "while waiting for send/recv from rank 0";
      try {
        const Works works{send(kRoot), receive(kRoot)};
        // Rank 0 may come last and then wait as long for others. It knows who is missing, so this
        // rank waits for its word.
        WaitingTime time = waiting_time(2 * timeout + kGrace);
        for (const auto& work : works)
          if (!ends_in(time, *work, interrupted)) {
            const std::string late =
                ": timed out after twice its timeout of " + std::to_string(timeout.count()) + " ms";
            collectives_->abort(reached + late);
            fail(FailureKind::kTimeout, reached + late);
          }
      } catch (const CollectiveFailure& error) {
        if (error.failure().kind == FailureKind::kConfiguration ||
            error.failure().message.compare(0, reached.size(), reached) == 0)
          throw;
        fail(error.failure().kind, reached + ": " + error.failure().message);
      }
      return;
    }
    WaitingTime time = waiting_time(timeout);
    std::vector<int> absent;
    try {
      Works come;
      for (int rank = 1; rank < size_; ++rank) come.push_back(receive(rank));
      for (int rank = 1; rank < size_; ++rank) {
        if (ends_in(time, *come[static_cast<std::size_t>(rank - 1)], interrupted)) continue;
        absent.push_back(rank);
        if (!wait_all_ranks) break;
      }
    } catch (const CollectiveFailure& error) {
      if (error.failure().kind == FailureKind::kConfiguration) throw;  // it is closed
      fail(error.failure().kind, cut_short(absent, timeout, error.failure()));
    }
    if (!absent.empty()) {
      collectives_->abort(not_passed(absent, timeout));
      fail(FailureKind::kTimeout,
           not_passed(absent, timeout) +
               ". Look at what those ranks do instead, or give a longer timeout");
    }
    Works answers;
    for (int rank = 1; rank < size_; ++rank) answers.push_back(send(rank));
    for (const auto& work : answers) work->wait(0, interrupted);
  });
}

}  // namespace pycollective::shim
