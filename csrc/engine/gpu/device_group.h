// A communicator's GPUs, as one rank uses them: its mailbox, the mapped mailboxes of its peers, and
// launches in order. Kernels carry out calls on arrays of this GPU (peer_memory.h).
//
// On the host, such a call is short: all ranks arrive, compare what they have called, and launch.
// Then the call is done for the host, and its result comes in the order of the call's stream. So a
// kernel waits only for peers whose launches are under way, and a mismatch moves nothing.
//
// Its owner looks at it while something is under way (wants_watch()). So a dead peer or another
// failure ends the waits on the device, and a failure on the device becomes the communicator's.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "engine/gpu/device_mailbox.h"
#include "engine/gpu/peer_memory.h"
#include "engine/group.h"
#include "per_process.h"
#include "shared_memory/node.h"

namespace pycollective {

class DeviceGroup final : public MappedMemory {
 public:
  // Makes the plan of the algorithm "direct".
  using DirectPrograms = std::function<std::shared_ptr<const Program>(OpKind kind, int root)>;

  // Maps the peers' mailboxes. `cards`: of all members, this one included. Throws
  // std::runtime_error if one cannot be mapped.
  DeviceGroup(std::shared_ptr<DeviceMailbox> own, Member me, const std::vector<DeviceCard>& cards);
  // Nobody may use its mailbox any more, and nothing of it may be under way.
  ~DeviceGroup() override;
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int device() const { return own_->gpu().traits().ordinal; }

  // With an empty source, later calls that need a new plan are refused.
  void set_source(DirectPrograms source);
  // Whether kernels carry out such calls. The same on all ranks.
  static bool serves(OpKind kind) { return !is_pair(kind) && kind != OpKind::kBarrier; }
  // Chooses the task's plan, if it has none, and uploads it to the device. Notes whether the stream
  // is being captured: then the launch must come before the capture ends. Called before the ranks
  // arrive, so that an invalid call is refused on this rank alone. Throws std::invalid_argument,
  // cuda::DriverError.
  void prepare(Task& task);
  // Launches, in the order of the calls, and returns the launch's number. Each wait on the device
  // lasts at most so many seconds. Throws std::runtime_error if a capture of the stream has begun
  // or ended since prepare(), std::invalid_argument if a capture forbids the call by now,
  // cuda::DriverError.
  std::uint64_t launch(const Task& task, double seconds);

  // Whether something may be under way on the device: a launch that is not done, or a captured
  // graph, which may be replayed at any time. Cheap; as of the last look().
  bool under_way() const { return launched_ || captured_; }
  // Whether a thread must begin to watch what is under way. True once, until still_watched() tells
  // that thread that there is nothing more.
  bool wants_watch() { return under_way() && !watched_.exchange(true); }
  bool still_watched() {
    // In this order: a launch that comes meanwhile is seen here or by the launching thread.
    watched_ = false;
    return wants_watch();
  }
  // Asks the device. Returns whether all launches are done, well or badly: failure() tells which.
  bool look();
  // Whether a launch was seen to end well.
  bool has_ended_well(std::uint64_t launch) const { return launch <= ended_well_; }
  // Once look() has returned true: whether all living peers are done with the launches, too, so
  // that this rank's mailbox may go. True if a wait has ended badly: there are no results then.
  // False if the driver fails; failure() reports that.
  bool peers_have_done(const Group& group);
  // A failure on the device: the driver's, or a wait that has timed out.
  std::optional<Failure> failure(const Group& group) const;
  // The failure if a peer is dead for which the device may wait. Asks the kernel: do not call it in
  // each iteration of a wait.
  std::optional<Failure> lost_peer(const Group& group) const;
  // Ends all waits on the device, now and later. What is launched or replayed after this does
  // nothing; but PeerMemory::poison() says what happens on a full GPU. If the driver refuses, the
  // next call tries again.
  void abort();
  // Whether there are no results: waits have ended badly, or will.
  bool aborted() const { return aborted_ || peers_->ending().has_value(); }
  // Nothing will be launched any more. Other communicators may use its blocks now, or, while
  // something is still under way, once make_room() finds that it has ended.
  static void give_back_blocks(const std::shared_ptr<DeviceGroup>& group);
  // Before a mailbox is made on this GPU: frees the blocks of groups that have ended. If none would
  // be left, waits up to a second for kernels that are about to end.
  static void make_room(int device);
  // After the group was left: nothing is launched any more, and replays do nothing. Also false if
  // the driver fails: then the peers' memory stays mapped.
  bool unmap_peers() noexcept override;
  void nobody_maps() noexcept override { own_->nobody_maps(); }
  // The number of calls launched so far, captured ones included.
  std::uint64_t launches() const { return launches_; }
  // Whether a launch is not done, as of the last look().
  bool launched() const { return launched_; }

 private:
  // How many captures with calls of this communicator may be open at once.
  static constexpr std::size_t kMostCaptures = 64;
  // The last launch within a capture: the next one in it comes after it, on whatever stream.
  struct InCapture {
    std::uint64_t capture = 0;  // 0: none yet
    cuda::CUevent event = nullptr;
  };

  std::shared_ptr<const Program> choose(const Request& request);
  bool try_to_give_back();
  static void sweep();
  InCapture& of_capture(std::uint64_t capture);
  void refuse_forgotten(std::uint64_t capture) const;
  void let_go();
  void note(const cuda::DriverError& error);

  std::shared_ptr<DeviceMailbox> own_;
  Member me_;
  int members_;
  std::vector<cuda::CUdeviceptr> opened_;  // of other processes
  std::unique_ptr<PeerMemory> peers_;
  cuda::CUevent last_ = nullptr;        // after the last launch
  std::vector<InCapture> in_captures_;  // the last launched comes last
  std::set<std::uint64_t> forgotten_;   // captures that were dropped from in_captures_
  const ForkGuard guard_;
  mutable std::mutex mutex_;
  DirectPrograms source_;
  std::map<std::pair<OpKind, int>, std::shared_ptr<const Program>> one_shot_;
  std::atomic<bool> launched_{false};
  std::atomic<bool> captured_{false};
  std::atomic<std::uint64_t> launches_{0};
  std::atomic<std::uint64_t> ended_well_{0};  // the last launch that was seen to
  std::atomic<bool> watched_{false};
  std::atomic<bool> aborted_{false};
  std::mutex poison_mutex_;
  bool poisoned_ = false;
  mutable std::mutex error_mutex_;
  std::string error_;  // of the driver
};

}  // namespace pycollective
