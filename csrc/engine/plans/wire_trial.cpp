#include "engine/plans/wire_trial.h"

#include <utility>

#include "engine/plans/program_choices.h"
#include "kernels/pack/pack.h"

namespace pycollective {
namespace {

// Programs that call with ever new kinds must not collect trials for ever.
constexpr std::size_t kMostKinds = 512;

int logarithm(std::size_t bytes) { return 63 - __builtin_clzll(bytes); }

}  // namespace

std::optional<Request> WireTrial::before(const Task& call) {
  const std::shared_ptr<WireTrial>& trial = call.trial;
  if (call.call_of_trial > kTries) return std::nullopt;
  Request request;
  request.wire = Wire::kRaw;
  request.timeout = call.timeout;
  if (is_try(call.call_of_trial)) return request;  // a barrier
  request.kind = OpKind::kAllReduce;
  request.dtype = Dtype::kFloat64;
  request.reduce_op = ReduceOp::kMax;
  request.input = trial->least_.data();
  request.output = trial->agreed_.data();
  request.count = trial->least_.size();
  request.keep = trial;
  return request;
}

std::size_t WireTrials::Hash::operator()(const Kind& each) const {
  const std::size_t small =
      static_cast<std::size_t>(each.kind) | static_cast<std::size_t>(each.dtype) << 4 |
      static_cast<std::size_t>(each.reduce_op) << 8 |
      static_cast<std::size_t>(each.magnitude) << 12 | static_cast<std::size_t>(each.root) << 20;
  return (reinterpret_cast<std::size_t>(each.program) ^ small << 16) * 0x9e3779b97f4a7c15u >> 20;
}

WireTrials::NextCall WireTrials::next(const Task& task, int ranks) {
  const Request& request = *task.request;
  if (!find_packing(request.dtype, SimdLevel::kPortable).pack) return {};
  const std::size_t bytes = whole_bytes(request, ranks);
  if (bytes < kLeast) return {};
  const Kind kind{request.kind, request.dtype,    request.reduce_op,
                  request.root, logarithm(bytes), task.program.get()};
  const std::lock_guard lock(mutex_);
  auto found = known_.find(kind);
  if (found == known_.end()) {
    if (known_.size() >= kMostKinds) known_.clear();
    found = known_.emplace(kind, Known{task.program, std::make_shared<WireTrial>()}).first;
  }
  const std::shared_ptr<WireTrial>& trial = found->second.trial;
  return {trial, trial->next_call()};
}

}  // namespace pycollective
