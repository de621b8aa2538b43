// A communicator's GPUs, as one rank uses them: its mailbox, the peers' mapped, and launches in
// order. Calls on arrays of this GPU are carried out there, by kernels (peer_memory.h).
//
// The host's part of such a call: all ranks meet, compare what they called, and launch; then the
// call is done for the host, and its result comes in order with the call's stream. So a kernel
// waits for peers whose launches are under way, and a mismatch moves nothing.
//
// Whoever owns this looks at it while something is under way (watch()), so that a peer's death or
// any failure ends the waits on the device, and what ended there becomes the communicator's
// failure.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/device/device_mailbox.h"
#include "engine/device/peer_memory.h"
#include "engine/group.h"

namespace pycollective {

class DeviceGroup {
 public:
  // The schedule "direct" of an operation, and its root.
  using DirectPrograms = std::function<std::shared_ptr<const Program>(OpKind kind, int root)>;

  // `cards` of all members, this one's own among them. Maps the peers' mailboxes. Throws
  // std::runtime_error where one cannot be mapped.
  DeviceGroup(std::shared_ptr<DeviceMailbox> own, Member me, const std::vector<DeviceCard>& cards);
  // Nobody uses its mailbox any more, and nothing of it is under way.
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int device() const { return own_->gpu().traits().ordinal; }

  // Lets go of where programs come from; calls that need another one are refused afterwards.
  void set_source(DirectPrograms source);
  // Whether these calls are carried out on the device, on all ranks or none.
  static bool serves(OpKind kind) { return !is_pair(kind) && kind != OpKind::kBarrier; }
  // Chooses the request's program, if it has none, and makes sure that launch() can only fail with
  // the driver. Returns whether its stream is being captured: then it has to be launched before the
  // capture ends. Before the ranks meet; throws std::invalid_argument, cuda::DriverError.
  bool prepare(Request& request);
  // In the order of the calls. Each wait on the device lasts at most the request's timeout.
  void launch(const Request& request);

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
  // Whether all peers that live have done with what look() says is done here: this rank's mailbox
  // may go. True where a wait has ended badly, for results are none then.
  bool peers_have_done(const Group& group);
  // What has gone wrong on the device: it has failed, or a wait of its own accord has ended badly.
  std::optional<Failure> failure(const Group& group) const;
  // Whether who is dead may be waited for there: asks the kernel, so not at every turn.
  std::optional<Failure> lost_peer(const Group& group) const;
  // Makes all waits on the device end, now and later, and what is launched later do nothing.
  void abort();
  // Whether results are none: waits have ended so, or will.
  bool aborted() const { return aborted_ || peers_->ending().has_value(); }
  // Calls that were launched so far, those captured included.
  std::uint64_t launches() const { return launches_; }
  // Whether a launch is not done, as of the last look().
  bool launched() const { return launched_; }

 private:
  std::shared_ptr<const Program> choose(const Request& request);

  std::shared_ptr<DeviceMailbox> own_;
  Member me_;
  int members_;
  std::vector<cuda::CUdeviceptr> opened_;  // of other processes
  std::unique_ptr<PeerMemory> peers_;
  cuda::CUevent last_ = nullptr;  // after the last launch
  mutable std::mutex mutex_;
  DirectPrograms source_;
  std::map<std::pair<OpKind, int>, std::shared_ptr<const Program>> direct_;
  std::map<std::pair<OpKind, int>, std::shared_ptr<const Program>> one_shot_;
  std::atomic<bool> launched_{false};
  std::atomic<bool> captured_{false};
  std::atomic<std::uint64_t> launches_{0};
  std::atomic<bool> watched_{false};
  std::atomic<bool> aborted_{false};
  mutable std::mutex error_mutex_;
  std::string error_;  // of the driver
};

}  // namespace pycollective
