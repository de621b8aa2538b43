#include "engine/device/device_group.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/device/one_shot_program.h"
#include "engine/program_choices.h"

namespace pycollective {
namespace {

using cuda::check;
using cuda::Current;
using cuda::driver;

// Up to so many bytes a second wait costs more than to reduce all of it on every rank.
constexpr std::size_t kMostOneShot = std::size_t{256} << 10;
// Waits on the device without a limit of their own would be ones without a bound.
constexpr double kLongest = 1e9;  // seconds

bool captures(cuda::CUstream stream) {
  cuda::CUstreamCaptureStatus status = cuda::CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != cuda::CU_STREAM_CAPTURE_STATUS_NONE;
}

// A peer's mailbox, as this GPU's context sees it. `opened`: it has to be closed.
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
  } catch (...) {
    for (const cuda::CUdeviceptr each : opened_)
      static_cast<void>(driver().cuIpcCloseMemHandle(each));
    if (last_ != nullptr) static_cast<void>(driver().cuEventDestroy(last_));
    throw;
  }
}

DeviceGroup::~DeviceGroup() {
  peers_.reset();
  try {
    const Current current(own_->gpu().context());
    for (const cuda::CUdeviceptr each : opened_)
      static_cast<void>(driver().cuIpcCloseMemHandle(each));
    static_cast<void>(driver().cuEventDestroy(last_));
  } catch (const cuda::DriverError&) {
    // The context is gone, and all of this with it.
  }
}

void DeviceGroup::set_source(DirectPrograms source) {
  // Whoever lets go of it may need the interpreter: out of the lock.
  const std::lock_guard lock(mutex_);
  source_.swap(source);
}

std::shared_ptr<const Program> DeviceGroup::choose(const Request& request) {
  const int root = traits_of(request.kind).rooted ? request.root : 0;
  const std::pair key{request.kind, root};
  const bool small = traits_of(request.kind).reduces && !in_shards(request.kind) &&
                     whole_bytes(request, members_) <= kMostOneShot;
  if (small) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const Program>& known = one_shot_[key];
    if (!known) known = make_one_shot(request.kind, root, me_.index(), members_);
    return known;
  }
  DirectPrograms source;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = direct_.find(key); found != direct_.end()) return found->second;
    source = source_;
  }
  if (!source) throw std::invalid_argument("the communicator is closed");
  std::shared_ptr<const Program> made = source(request.kind, root);  // needs the interpreter
  const std::lock_guard lock(mutex_);
  return direct_.emplace(key, std::move(made)).first->second;
}

bool DeviceGroup::prepare(Request& request) {
  constexpr std::uintptr_t kPerThread = 2;
  if (reinterpret_cast<std::uintptr_t>(request.location.stream) == kPerThread)
    throw std::invalid_argument(
        "the per-thread default stream is another one on each thread: give a stream of its own");
  if (request.location.device == Location::kAnyDevice) request.location.device = device();
  if (request.location.device != device())
    throw std::invalid_argument("the arrays lie on GPU " + std::to_string(request.location.device) +
                                ", and this communicator is on GPU " + std::to_string(device()));
  if (!request.program) request.program = choose(request);
  if (!peers_->has_room(*request.program, request.dtype, request.reduce_op))
    throw std::invalid_argument("algorithm '" + request.program->algorithm +
                                "' hands over too much at a time for this communicator's device "
                                "mailboxes; use algorithm='auto'");
  const std::lock_guard lock(mutex_);
  const Current current(own_->gpu().context());
  const bool captured = captures(static_cast<cuda::CUstream>(request.location.stream));
  if (!captured)
    peers_->upload(request.program);
  else if (!peers_->knows(*request.program))
    throw std::invalid_argument(
        "algorithm '" + request.program->algorithm +
        "' is new to the GPU, which it cannot become while a graph is captured: make the call once "
        "before capturing");
  return captured;
}

void DeviceGroup::launch(const Request& request) {
  const auto stream = static_cast<cuda::CUstream>(request.location.stream);
  const auto nanoseconds = static_cast<std::uint64_t>(std::min(request.timeout, kLongest) * 1e9);
  const std::lock_guard lock(mutex_);
  const Current current(own_->gpu().context());
  const bool captured = captures(stream);
  // A mailbox serves one launch at a time, whatever the streams. A graph is ordered by whoever
  // replays it.
  if (launched_ && !captured)
    check(driver().cuStreamWaitEvent(stream, last_, 0), "cuStreamWaitEvent");
  if (captured) captured_ = true;
  peers_->launch(request, stream, nanoseconds);
  ++launches_;
  if (captured) return;
  check(driver().cuEventRecord(last_, stream), "cuEventRecord");
  launched_ = true;
}

bool DeviceGroup::look() {
  if (!launched_) return true;
  // A launch may wait for room on its stream: then this is not the last.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const Current current(own_->gpu().context());
  const cuda::CUresult result = driver().cuEventQuery(last_);
  if (result == cuda::CUDA_ERROR_NOT_READY) return false;
  launched_ = false;
  try {
    check(result, "cuEventQuery");
  } catch (const cuda::DriverError& error) {
    const std::lock_guard error_lock(error_mutex_);
    error_ = error.what();
  }
  return true;
}

bool DeviceGroup::peers_have_done(const Group& group) {
  if (aborted() || aborted_) return true;
  try {
    const std::lock_guard lock(mutex_);
    const std::vector<bool> done = peers_->have_done();
    for (const Member each : group.members())
      if (!done[each.at()] && group.alive(each)) return false;
    return true;
  } catch (const cuda::DriverError&) {
    return true;  // the context is gone
  }
}

void DeviceGroup::abort() {
  if (aborted_.exchange(true)) return;
  peers_->abort();
  try {
    const std::lock_guard lock(mutex_);
    peers_->poison();
  } catch (const cuda::DriverError&) {
    // The context is gone: nothing will be launched.
  }
}

std::optional<Failure> DeviceGroup::failure(const Group& group) const {
  const int rank = group.world().rank;
  const std::string gpu = "rank " + std::to_string(rank) + "'s GPU " + std::to_string(device());
  {
    const std::lock_guard lock(error_mutex_);
    if (!error_.empty())
      return Failure{FailureKind::kAborted, rank, OpKind::kBarrier, 0,
                     gpu + " has failed: " + error_};
  }
  const auto ended = peers_->ending();
  // Whoever aborted it knows why.
  if (!ended || ended->why == cuda::Ending::kAborted) return std::nullopt;
  return Failure{FailureKind::kTimeout, rank, OpKind::kBarrier, 0,
                 gpu + " waited for " + group.describe(ended->member) +
                     " until its time ran out (block " + std::to_string(ended->block) +
                     "): that rank's GPU has not come to the call. Look at what is on its stream "
                     "before, or give a longer timeout"};
}

std::optional<Failure> DeviceGroup::lost_peer(const Group& group) const {
  for (const Member each : group.members()) {
    if (each == group.me()) continue;
    // Who has left has launched all that it was to launch, and its mailbox stays.
    if (group.has_left(each) || group.alive(each)) continue;
    const int rank = group.world().rank;
    return Failure{FailureKind::kPeerFailure, rank, OpKind::kBarrier, 0,
                   group.describe(each) +
                       " died: its process ended while work was under way on GPUs, seen by rank " +
                       std::to_string(rank) +
                       ". The communicator does no more work; the output of "
                       "rank " +
                       std::to_string(group.rank_of(each)) +
                       " tells why, and the job must be started again"};
  }
  return std::nullopt;
}

}  // namespace pycollective
