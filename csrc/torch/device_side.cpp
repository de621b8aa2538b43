#include "torch/device_side.h"

#include <pybind11/chrono.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <algorithm>

namespace pycollective::shim {

PythonObject::~PythonObject() {
  // While the interpreter finalizes no Python object may be touched: leak it.
  if (!Py_IsInitialized() || Py_IsFinalizing() || other_threads_stop()) {
    held_.release();
    return;
  }
  const GilHeld gil;
  held_ = {};
}

// A work of Python's.

bool PythonWork::isCompleted() {
  return in_python([&] { return work_.get().attr("is_completed")().cast<bool>(); });
}

bool PythonWork::isSuccess() const {
  return in_python([&] { return work_.get().attr("is_success")().cast<bool>(); });
}

std::exception_ptr PythonWork::exception() const {
  return in_python([&]() -> std::exception_ptr {
    const pybind11::object raised = work_.get().attr("exception")();
    return raised.is_none() ? nullptr : carried_exception(raised.ptr());
  });
}

std::vector<at::Tensor> PythonWork::result() {
  return in_python([&] { return work_.get().attr("result")().cast<std::vector<at::Tensor>>(); });
}

void PythonWork::synchronize() {
  in_python([&] { work_.get().attr("synchronize")(); });
}

bool PythonWork::wait(std::chrono::milliseconds timeout) {
  return in_python([&] {
    const pybind11::object limit =
        timeout.count() > 0 ? pybind11::cast(timeout) : pybind11::object(pybind11::none());
    return work_.get().attr("wait")(limit).cast<bool>();
  });
}

void PythonWork::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "a single operation cannot be aborted; abort its process group");
}

c10::intrusive_ptr<c10::ivalue::Future> PythonWork::getFuture() {
  return in_python([&] {
    using Wrapper = torch::jit::PythonFutureWrapper;
    return work_.get().attr("get_future")().cast<std::shared_ptr<Wrapper>>()->fut;
  });
}

// Several.

bool CoalescedWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& each) { return each->isCompleted(); });
}

bool CoalescedWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(),
                     [](const auto& each) { return each->isSuccess(); });
}

std::exception_ptr CoalescedWork::exception() const {
  for (const auto& each : works_)
    if (std::exception_ptr raised = each->exception()) return raised;
  return nullptr;
}

std::vector<at::Tensor> CoalescedWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& each : works_) {
    const std::vector<at::Tensor> of_one = each->result();
    all.insert(all.end(), of_one.begin(), of_one.end());
  }
  return all;
}

void CoalescedWork::synchronize() {
  for (const auto& each : works_) each->synchronize();
}

bool CoalescedWork::wait(std::chrono::milliseconds timeout) {
  bool all = true;
  for (const auto& each : works_) all = each->wait(timeout) && all;
  return all;
}

void CoalescedWork::abort() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "coalesced calls cannot be aborted; abort their group");
}

c10::intrusive_ptr<c10::ivalue::Future> CoalescedWork::getFuture() {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "coalesced calls of several kinds have no future; wait()");
}

// Calls on devices.

DeviceSide::DeviceSide(pybind11::object object) : object_(std::move(object)) {
  takes_cpu_ = object_.get().attr("takes_cpu").cast<bool>();
}

bool DeviceSide::may_come() const {
  return in_python([&] { return object_.get().attr("may_come").cast<bool>(); });
}

bool DeviceSide::is_exact(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  using Theirs = c10d::ReduceOp;
  constexpr std::array kOps{Theirs::SUM, Theirs::PRODUCT, Theirs::MIN, Theirs::MAX};
  constexpr std::array kDtypes{at::kChar, at::kByte, at::kInt, at::kLong};  // that NCCL has
  return std::count(kOps.begin(), kOps.end(), op.op_) > 0 &&
         std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& each) {
           return std::count(kDtypes.begin(), kDtypes.end(), each.scalar_type()) > 0;
         });
}

DeviceSide::Carrier DeviceSide::made(std::optional<at::Device> bound) {
  return known_or("made", bound);
}

DeviceSide::Carrier DeviceSide::carrier(std::optional<at::Device> bound) {
  return known_or("carrier", bound);
}

DeviceSide::Carrier DeviceSide::known_or(const char* method, std::optional<at::Device> bound) {
  {
    const std::lock_guard lock(mutex_);
    if (carrier_) return carrier_;
  }
  Carrier carrier = in_python([&] {  // which has its own lock
    const pybind11::object found = object_.get().attr(method)();
    return found.is_none() ? Carrier() : found.cast<Carrier>();
  });
  if (carrier && bound) carrier->setBoundDeviceId(bound);
  const std::lock_guard lock(mutex_);
  return carrier_ = std::move(carrier);
}

void DeviceSide::set_timeout(double seconds) {
  in_python([&] { object_.get().attr("set_timeout")(seconds); });
}

void DeviceSide::abort() {
  in_python([&] { object_.get().attr("abort")(); });
}

void DeviceSide::shutdown() {
  in_python([&] { object_.get().attr("close")(); });
  const std::lock_guard lock(mutex_);
  carrier_ = {};  // the next call hears from Python that the group is destroyed
}

}  // namespace pycollective::shim
