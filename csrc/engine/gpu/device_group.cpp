#include "engine/gpu/device_group.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "engine/gpu/device_program.h"
#include "engine/gpu/launch_order.h"
#include "engine/plans/plan_cache.h"
#include "engine/watch.h"
#include "per_process.h"

namespace pycollective {
namespace {

using cuda::check;
using cuda::Current;
using cuda::driver;

// Up to so many bytes, a second wait costs more than to reduce everything on every rank.
constexpr std::size_t kMostOneShot = std::size_t{256} << 10;
// No wait on the device is unbounded.
constexpr double kLongest = 1e9;  // seconds

// The number of the capture that the stream takes part in, never used again; 0: none. Throws
// std::invalid_argument if that capture has failed, or another one forbids the call.
std::uint64_t capture_of(cuda::CUstream stream) {
  cuda::CUstreamCaptureStatus status = cuda::CU_STREAM_CAPTURE_STATUS_NONE;
  std::uint64_t number = 0;
  const cuda::CUresult result =
      driver().cuStreamGetCaptureInfo(stream, &status, &number, nullptr, nullptr, nullptr);
  if (result == cuda::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    throw std::invalid_argument(
        "another stream of its GPU is being captured, and the default stream, which the call is "
        "on, waits for that one: give it the captured stream, or make it outside of the graph");
  check(result, "cuStreamGetCaptureInfo");
  if (status == cuda::CU_STREAM_CAPTURE_STATUS_INVALIDATED)
    throw std::invalid_argument("the capture of its stream has failed before");
  return status == cuda::CU_STREAM_CAPTURE_STATUS_ACTIVE ? number : 0;
}

// A peer's mailbox, mapped into this GPU's context. `opened`: it must be closed later.
cuda::CUdeviceptr map(const DeviceCard& card, const DeviceMailbox& own, bool& opened) {
  opened = card.process != own.card().process;
  if (opened) {
    cuda::CUdeviceptr address = 0;
    check(driver().cuIpcOpenMemHandle(&address, card.handle,
                                      cuda::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
          "cuIpcOpenMemHandle");
    return address;
  }
  if (card.device != own.card().device) {
    const cuda::CUresult result =
        driver().cuCtxEnablePeerAccess(cuda::Gpu::at(card.device).context(), 0);
    if (result != cuda::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
      check(result, "cuCtxEnablePeerAccess");
  }
  return card.address;
}

// Groups that were left while something was under way.
struct Unfinished {
  std::mutex mutex;
  std::vector<std::weak_ptr<DeviceGroup>> all;
};
PerProcess<Unfinished> unfinished;

// Aborted kernels end within milliseconds.
constexpr std::chrono::seconds kLongestForRoom{1};
constexpr std::chrono::microseconds kBetweenSweeps{500};

}  // namespace

DeviceGroup::DeviceGroup(std::shared_ptr<DeviceMailbox> own, Member me,
                         const std::vector<DeviceCard>& cards)
    : own_(std::move(own)), me_(me), members_(static_cast<int>(cards.size())) {
  if (me.at() >= cards.size() || cards[me.at()].address != own_->address())
    throw std::invalid_argument("the card of this rank's own mailbox is not among the cards");
  const Current current(own_->gpu().context());
  std::vector<cuda::CUdeviceptr> mailboxes(cards.size(), own_->address());
  cuda::MailboxShape shape = own_->card().shape;
  try {
    for (const Member each : Members(members_)) {
      const DeviceCard& card = cards[each.at()];
      shape.blocks = std::min(shape.blocks, card.shape.blocks);
      shape.slot_bytes = std::min(shape.slot_bytes, card.shape.slot_bytes);
      if (each == me_) continue;
      bool opened = false;
      mailboxes[each.at()] = map(card, *own_, opened);
      if (opened) opened_.push_back(mailboxes[each.at()]);
    }
    check(driver().cuEventCreate(&last_, cuda::CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    peers_ = std::make_unique<PeerMemory>(*own_->kernels(), own_->gpu().context(), me_,
                                          std::move(mailboxes), shape);
    own_->keep_blocks(shape.blocks);  // the smallest share of any member
  } catch (...) {
    let_go();
    throw;
  }
}

DeviceGroup::~DeviceGroup() {
  peers_.reset();
  if (guard_.forked()) return;  // it is the parent's
  try {
    const Current current(own_->gpu().context());
    let_go();
  } catch (const cuda::DriverError&) {
    // The context is gone, and all of this with it.
  }
}

bool DeviceGroup::unmap_peers() noexcept {
  if (guard_.forked() || !look()) return false;
  std::vector<cuda::CUdeviceptr> opened;
  try {
    const Current current(own_->gpu().context());
    {
      const std::lock_guard lock(mutex_);
      opened.swap(opened_);
    }
    // Later replays do nothing; for what is under way the driver waits. Both without the lock,
    // which another thread may need meanwhile.
    if (captured_ && !opened.empty()) peers_->poison();
    while (!opened.empty() && driver().cuIpcCloseMemHandle(opened.back()) == cuda::CUDA_SUCCESS)
      opened.pop_back();
  } catch (const cuda::DriverError&) {
    // The context may be gone; whether the mappings are is unknown.
  }
  if (opened.empty() && opened_.empty()) return true;
  const std::lock_guard lock(mutex_);
  opened_.insert(opened_.end(), opened.begin(), opened.end());
  return false;
}

void DeviceGroup::let_go() {
  for (const cuda::CUdeviceptr each : opened_)
    static_cast<void>(driver().cuIpcCloseMemHandle(each));
  if (last_ != nullptr) static_cast<void>(driver().cuEventDestroy(last_));
  for (const InCapture& each : in_captures_) static_cast<void>(driver().cuEventDestroy(each.event));
}

void DeviceGroup::set_source(DirectPrograms source) {
  // The old source may hold Python objects: destroyed without the lock.
  const std::lock_guard lock(mutex_);
  source_.swap(source);
}

std::shared_ptr<const Program> DeviceGroup::choose(const Request& request) {
  const int root = traits_of(request.kind).rooted ? request.root : 0;
  const bool small = traits_of(request.kind).reduces && !in_shards(request.kind) &&
                     whole_bytes(request, members_) <= kMostOneShot;
  if (small) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const Program>& known = one_shot_[{request.kind, root}];
    if (!known) known = make_one_shot(request.kind, root, me_.index(), members_);
    return known;
  }
  DirectPrograms source;
  {
    const std::lock_guard lock(mutex_);
    source = source_;
  }
  // The source may need the interpreter, and has no plan left once the communicator is closed.
  std::shared_ptr<const Program> plan = source ? source(request.kind, root) : nullptr;
  if (!plan) throw std::invalid_argument("the communicator is closed");
  return plan;
}

void DeviceGroup::prepare(Task& task) {
  const Request& request = *task.request;
  constexpr std::uintptr_t kPerThread = 2;
  if (reinterpret_cast<std::uintptr_t>(request.location.stream) == kPerThread)
    throw std::invalid_argument(
        "the per-thread default stream is another one on each thread: give a stream of its own");
  if (request.location.device != Location::kAnyDevice && request.location.device != device())
    throw std::invalid_argument("the arrays lie on GPU " + std::to_string(request.location.device) +
                                ", and this communicator is on GPU " + std::to_string(device()));
  if (!task.program) task.program = choose(request);
  if (!peers_->has_room(*task.program, request.dtype, request.reduce_op))
    throw std::invalid_argument("algorithm '" + task.program->algorithm +
                                "' hands over too much at a time for this communicator's device "
                                "mailboxes; use algorithm='auto'");
  const std::lock_guard lock(mutex_);
  const Current current(own_->gpu().context());
  const auto stream = static_cast<cuda::CUstream>(request.location.stream);
  const std::uint64_t capture = capture_of(stream);
  task.captured = capture != 0;
  refuse_forgotten(capture);
  // A captured call is launched at once, and ordered by the capture and by replays.
  if (!task.captured)
    task.launch_turn = std::make_shared<LaunchTurn>(LaunchOrder::stream_of(device(), stream));
  if (!task.captured)
    peers_->upload(task.program);
  else if (!peers_->knows(*task.program))
    throw std::invalid_argument(
        "algorithm '" + task.program->algorithm +
        "' is new to the GPU, which it cannot become while a graph is captured: make the call once "
        "before capturing");
}

// Its last launch is not known any more, so the next one could not be ordered after it.
void DeviceGroup::refuse_forgotten(std::uint64_t capture) const {
  if (forgotten_.count(capture) == 0) return;
  throw std::invalid_argument("calls of " + std::to_string(kMostCaptures) +
                              " other captures have come since the last of this one: capture "
                              "fewer graphs at once");
}

// The entry of this capture, with the event of its last launch, if any; moved to the end. The
// driver does not tell which captures have ended, so the oldest entry is reused.
DeviceGroup::InCapture& DeviceGroup::of_capture(std::uint64_t capture) {
  refuse_forgotten(capture);
  auto found = std::find_if(in_captures_.begin(), in_captures_.end(),
                            [&](const InCapture& each) { return each.capture == capture; });
  if (found == in_captures_.end()) {
    if (in_captures_.size() < kMostCaptures) {
      InCapture made;
      check(driver().cuEventCreate(&made.event, cuda::CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      found = in_captures_.insert(found, made);
    } else {
      found = in_captures_.begin();
      if (found->capture != 0) forgotten_.insert(found->capture);
      found->capture = 0;
    }
  }
  std::rotate(found, found + 1, in_captures_.end());
  return in_captures_.back();
}

std::uint64_t DeviceGroup::launch(const Task& task, double seconds) {
  const auto stream = static_cast<cuda::CUstream>(task.request->location.stream);
  const auto nanoseconds = static_cast<std::uint64_t>(std::min(seconds, kLongest) * 1e9);
  const std::lock_guard lock(mutex_);
  const Current current(own_->gpu().context());
  const std::uint64_t capture = capture_of(stream);
  if (task.captured != (capture != 0))
    throw std::runtime_error(task.captured
                                 ? "the capture of its stream has ended since the call"
                                 : "a capture of its stream has begun since the call: wait for "
                                   "asynchronous calls before");
  // A mailbox serves one launch at a time, whatever the streams. The user orders replays of graphs;
  // the edges made here order the launches within one.
  if (capture != 0) {
    InCapture& before = of_capture(capture);
    if (before.capture != 0)
      check(driver().cuStreamWaitEvent(stream, before.event, 0), "cuStreamWaitEvent");
    captured_ = true;
    peers_->launch(task, stream, nanoseconds);
    ++launches_;
    check(driver().cuEventRecord(before.event, stream), "cuEventRecord");
    before.capture = capture;
    return launches_;
  }
  if (launched_) check(driver().cuStreamWaitEvent(stream, last_, 0), "cuStreamWaitEvent");
  peers_->launch(task, stream, nanoseconds);
  ++launches_;
  const cuda::CUresult recorded = driver().cuEventRecord(last_, stream);
  // A caller that is told of a failure waits for the kernel to end, and needs the event for that.
  if (recorded != cuda::CUDA_SUCCESS) static_cast<void>(driver().cuEventRecord(last_, stream));
  launched_ = true;
  check(recorded, "cuEventRecord");
  return launches_;
}

bool DeviceGroup::look() {
  if (!launched_) return true;
  // Another thread may be in a launch that waits for its stream: then this is not the last.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  try {
    const Current current(own_->gpu().context());
    const cuda::CUresult result = driver().cuEventQuery(last_);
    if (result == cuda::CUDA_ERROR_NOT_READY) return false;
    check(result, "cuEventQuery");
    if (!aborted()) ended_well_ = launches_.load();
  } catch (const cuda::DriverError& error) {
    note(error);
  }
  launched_ = false;
  return true;
}

bool DeviceGroup::try_to_give_back() {
  try {
    if (!look()) return false;
  } catch (const cuda::DriverError&) {
    // The context is gone, and its blocks with it.
  }
  own_->keep_blocks(0);
  return true;
}

void DeviceGroup::give_back_blocks(const std::shared_ptr<DeviceGroup>& group) {
  if (group->try_to_give_back()) return;
  group->own_->end_blocks();
  const std::lock_guard lock(unfinished->mutex);
  unfinished->all.push_back(group);
}

void DeviceGroup::sweep() {
  // To destroy one may wait for its GPU: not under the lock.
  std::vector<std::weak_ptr<DeviceGroup>> all;
  {
    const std::lock_guard lock(unfinished->mutex);
    all.swap(unfinished->all);
  }
  for (const std::weak_ptr<DeviceGroup>& each : all)
    if (const std::shared_ptr<DeviceGroup> group = each.lock()) give_back_blocks(group);
}

void DeviceGroup::make_room(int device) {
  const auto until = std::chrono::steady_clock::now() + kLongestForRoom;
  for (sweep(); !BlockShare::is_left(device) && BlockShare::some_end(device); sweep()) {
    if (std::chrono::steady_clock::now() >= until) break;  // the caller will be told
    std::this_thread::sleep_for(kBetweenSweeps);
  }
}

bool DeviceGroup::peers_have_done(const Group& group) {
  if (aborted() || aborted_) return true;
  try {
    const std::lock_guard lock(mutex_);
    const std::vector<bool> done = peers_->have_done();
    for (const Member each : group.members())
      if (!done[each.at()] && group.alive(each)) return false;
    return true;
  } catch (const cuda::DriverError& error) {
    note(error);  // what peers still read is unknown: failure() reports it
    return false;
  }
}

void DeviceGroup::note(const cuda::DriverError& error) {
  const std::lock_guard lock(error_mutex_);
  if (error_.empty()) error_ = error.what();
}

void DeviceGroup::abort() {
  if (!aborted_.exchange(true)) {
    own_->end_blocks();  // a failed communicator ends soon
    peers_->abort();
  }
  // A second caller returns only once the first has poisoned it, too. Not under mutex_, which a
  // launch holds that waits for its stream.
  const std::lock_guard lock(poison_mutex_);
  if (poisoned_) return;
  try {
    peers_->poison();
    poisoned_ = true;
  } catch (const cuda::DriverError&) {
    // If the context is gone, nothing will be launched; if not, the next call tries again.
  }
}

std::optional<Failure> DeviceGroup::failure(const Group& group) const {
  const int rank = group.world().rank;
  const std::string gpu = "rank " + std::to_string(rank) + "'s GPU " + std::to_string(device());
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_.empty())
      return Failure::of_no_operation(FailureKind::kAborted, rank, gpu + " has failed: " + error_);
  }
  const auto ended = peers_->ending();
  // Where it was aborted, the reason is known already.
  if (!ended || ended->why == cuda::Ending::kAborted) return std::nullopt;
  return Failure::of_no_operation(
      FailureKind::kTimeout, rank,
      gpu + " timed out where it waited for " + group.describe(ended->member) + ", in block " +
          std::to_string(ended->block) +
          ": that rank's GPU has not come to the call. Look at what is on its stream "
          "before, or give a longer timeout");
}

std::optional<Failure> DeviceGroup::lost_peer(const Group& group) const {
  for (const Member each : group.members()) {
    if (each == group.me()) continue;
    // A rank that has left has made all its launches, and its mailbox stays.
    if (group.has_left(each) || group.alive(each)) continue;
    const int rank = group.world().rank;
    return Failure::of_no_operation(
        FailureKind::kPeerFailure, rank,
        loss_text(
            group.describe(each) + " died: its process ended while work was under way on GPUs",
            group.rank_of(each), rank));
  }
  return std::nullopt;
}

}  // namespace pycollective
