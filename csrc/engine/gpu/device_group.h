// A communicator's GPUs, as one rank uses them: its mailbox, the peers' mapped, and launches in
// order. Calls on arrays of this GPU are carried out there, by kernels (peer_memory.h).
//
// The host's part of such a call: all ranks meet, compare what they called, and launch; then the
// call is done for the host, and its result comes in order with the call's stream. So a kernel
// waits for peers whose launches are under way, and a mismatch moves nothing.
//
// Whoever owns this looks at it while something is under way (wants_watch()), so that a peer's
// death or any failure ends the waits on the device, and what ended there becomes the
// communicator's failure.
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
#include "fork_guard.h"
#include "shared_memory/node.h"

namespace pycollective {

class DeviceGroup final : public MappedMemory {
 public:
  // The schedule "direct" of an operation, and its root.
  using DirectPrograms = std::function<std::shared_ptr<const Program>(OpKind kind, int root)>;

  // `cards` of all members, this one's own among them. Maps the peers' mailboxes. Throws
  // std::runtime_error where one cannot be mapped.
  DeviceGroup(std::shared_ptr<DeviceMailbox> own, Member me, const std::vector<DeviceCard>& cards);
  // Nobody uses its mailbox any more, and nothing of it is under way.
  ~DeviceGroup() override;
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int device() const { return own_->gpu().traits().ordinal; }

  // Lets go of where programs come from; calls that need another one are refused afterwards.
  void set_source(DirectPrograms source);
  // Whether these calls are carried out on the device, on all ranks or none.
  static bool serves(OpKind kind) { return !is_pair(kind) && kind != OpKind::kBarrier; }
  // Chooses the task's program, if it has none, and makes it known to the device. Notes whether
  // its stream is being captured: then it has to be launched before the capture ends. Before the
  // ranks meet, so that what cannot be is refused on this rank alone, and launch() fails with the
  // driver, or where a capture has begun or ended since. Throws std::invalid_argument,
  // cuda::DriverError.
  void prepare(Task& task);
  // In the order of the calls. Returns the launch's number. Each wait on the device lasts at most
  // so many seconds. Throws std::runtime_error where the capture of its stream has begun or ended
  // since prepare(), std::invalid_argument where a capture forbids the call since,
  // cuda::DriverError.
  std::uint64_t launch(const Task& task, double seconds);

  // Whether something may be under way on the device: a launch that is not done, or a graph that
  // was captured, which may be replayed at any time. Cheap; as of the last look().
  bool under_way() const { return launched_ || captured_; }
  bool captured() const { return captured_; }
  // Whether somebody must begin to watch what is under way: says so once, until whoever watches
  // asks still_watched(), and is told that there is nothing more.
  bool wants_watch() { return under_way() && !watched_.exchange(true); }
  bool still_watched() {
    // In this order, so that of a launch meanwhile either this one knows, or who launched.
    watched_ = false;
    return wants_watch();
  }
  // Asks the device what is done. Returns whether all launches are, well or badly: see failure().
  bool look();
  // Whether a launch was seen to have ended well.
  bool has_ended_well(std::uint64_t launch) const { return launch <= ended_well_; }
  // Whether all peers that live have done with what look() says is done here: this rank's mailbox
  // may go. True where a wait has ended badly, for results are none then; false where the driver
  // does not say: then there is a failure().
  bool peers_have_done(const Group& group);
  // What has gone wrong on the device: it has failed, or a wait of its own accord has ended badly.
  std::optional<Failure> failure(const Group& group) const;
  // Whether who is dead may be waited for there: asks the kernel, so not at every turn.
  std::optional<Failure> lost_peer(const Group& group) const;
  // Makes all waits on the device end, now and later, and what is launched or replayed once this
  // has returned do nothing, whichever thread made it so first: but for what PeerMemory::poison
  // says of a full GPU, and where the driver refuses, which the next call tries again.
  void abort();
  // Whether results are none: waits have ended so, or will.
  bool aborted() const { return aborted_ || peers_->ending().has_value(); }
  // Nothing will be launched any more: others may use its blocks, now or, where something is still
  // under way, once make_room() finds that it has ended.
  static void give_back_blocks(const std::shared_ptr<DeviceGroup>& group);
  // Before a mailbox is made on this GPU: those that have ended give back their blocks. Where none
  // would be left, waits a second for those whose kernels are still on their way out.
  static void make_room(int device);
  // Of a group that was left: nothing is launched any more, and replays do nothing.
  // False also where the driver fails: then what is theirs stays mapped.
  bool unmap_peers() noexcept override;
  void nobody_maps() noexcept override { own_->nobody_maps(); }
  // Calls that were launched so far, those captured included.
  std::uint64_t launches() const { return launches_; }
  // Whether a launch is not done, as of the last look().
  bool launched() const { return launched_; }

 private:
  // That have calls of this communicator and are open at once.
  static constexpr std::size_t kMostCaptures = 64;
  // The last launch within a capture: the next one there comes after it, on whatever stream.
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
  std::vector<InCapture> in_captures_;  // who was launched last comes last
  std::set<std::uint64_t> forgotten_;   // captures that were pushed out
  const ForkGuard guard_;
  mutable std::mutex mutex_;
  DirectPrograms source_;
  std::map<std::pair<OpKind, int>, std::shared_ptr<const Program>> direct_;
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
