#include "engine/gpu/staged.h"

#include "cuda/staging.h"
#include "engine/shards.h"
#include "per_process.h"

namespace pycollective {
namespace {

Request on_host(const Task& task) {
  Request moved = *task.request;
  moved.input = task.staging->input();
  moved.output = task.staging->output();
  moved.location = {};
  moved.keep = task.staging;  // messages go from and to this memory
  return moved;
}

}  // namespace

std::shared_ptr<cuda::Staging> stage(const Request& request, int rank, int ranks) {
  const OperationTraits& traits = traits_of(request.kind);
  const std::size_t size = size_of(request.dtype);
  cuda::Staging::Sizes sizes;
  sizes.input = elements_of(traits.input, request, rank, ranks) * size;
  sizes.output = elements_of(traits.output, request, rank, ranks) * size;
  sizes.in_place = request.input == request.output && sizes.input == sizes.output;
  try {
    auto made = std::make_unique<cuda::Staging>(
        cuda::Gpu::at(request.location.device),
        static_cast<cuda::CUstream>(request.location.stream), request.input, sizes);
    return {made.release(), [guard = ForkGuard()](cuda::Staging* staging) {
              if (!guard.forked()) delete staging;  // else the parent's
            }};
  } catch (const cuda::DriverError&) {
    throw;
  } catch (const std::exception& error) {
    throw CollectiveFailure({FailureKind::kConfiguration, rank, request.kind, 0,
                             std::string(name_of(request.kind)) + ": " + error.what()});
  }
}

Staged::Staged(Group& group, const Task& task, std::uint64_t sequence)
    : Operation(group, task, sequence),
      on_host_(on_host(task)),
      task_on_host_(task.with(on_host_)) {
  task_on_host_.staging = nullptr;
}

State Staged::advance() {
  cuda::Staging& staging = *task_.staging;
  switch (step_) {
    case Step::kToHost:
      if (!staging.done()) return State::kBlocked;
      inner_ = &on_host_operation_.make(group_, task_on_host_, sequence_);
      inner_->start();
      step_ = Step::kMoving;
      return State::kProgressed;
    case Step::kMoving: {
      const State state = inner_->advance();
      if (state != State::kDone) return state;
      if (on_host_.output != nullptr) staging.copy_out(request_.output);
      step_ = Step::kToDevice;
      return State::kProgressed;
    }
    case Step::kToDevice:
      break;
  }
  return staging.done() ? State::kDone : State::kBlocked;
}

bool Staged::finished_by(Member member) const {
  return step_ == Step::kToDevice || (inner_ != nullptr && inner_->finished_by(member));
}

void Staged::compare_calls() const {
  if (step_ == Step::kMoving) inner_->compare_calls();
}

std::string Staged::internode_absentees() const {
  return inner_ != nullptr ? inner_->internode_absentees() : std::string();
}

std::set<int> Staged::internode_unfinished() const {
  return inner_ != nullptr ? inner_->internode_unfinished() : std::set<int>();
}

std::string Staged::held_up() const {
  switch (step_) {
    case Step::kToHost:
      return "this rank's own GPU has not come to it; what was put on the call's stream before is "
             "not done";
    case Step::kMoving:
      break;
    case Step::kToDevice:
      return "all ranks have finished their part, and this one's GPU has not taken the result";
  }
  return {};
}

bool Staged::must_poll() const { return awaits_device() || inner_->must_poll(); }

bool Staged::called_by(Member member) const {
  return inner_ != nullptr && inner_->called_by(member);
}

}  // namespace pycollective
