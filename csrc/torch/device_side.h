// Calls with tensors on devices.
//
// A backend of torch's own, NCCL, carries them: moves, barriers and what is exact in any order are
// its calls. Other reductions go to a Python object (pycollective/torch/device_side.py), which
// also makes that backend, at the first such call. Nothing of CUDA is linked.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/gil.h"
#include "torch/errors.h"

namespace pycollective::shim {

// Runs `act` with the GIL. It returns nothing of Python's. What Python raises leaves this as an
// exception that may be caught without the GIL.
template <class Act>
auto in_python(const Act& act) {
  const StopsAtExit stops;
  std::exception_ptr error;
  {
    const GilHeld gil;
    try {
      return act();
    } catch (pybind11::error_already_set& raised) {
      error = carried_exception(std::move(raised));
    }
  }
  std::rethrow_exception(error);
}

// A Python object that any thread may let go of.
class PythonObject {
 public:
  explicit PythonObject(pybind11::object held) : held_(std::move(held)) {}
  ~PythonObject();
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;
  // The caller holds the GIL.
  const pybind11::object& get() const { return held_; }

 private:
  pybind11::object held_;
};

// A work of Python's, a torch.distributed.Work, for C++.
class PythonWork final : public c10d::Work {
 public:
  PythonWork(int rank, c10d::OpType type, std::uint64_t sequence, pybind11::object work)
      : c10d::Work(rank, type), sequence_(sequence), work_(std::move(work)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return sequence_; }

 private:
  const std::uint64_t sequence_;
  const PythonObject work_;
};

// What a user is told who has lost a block of coalesced calls.
inline constexpr const char* kLeft =
    "If none is under way, an exception has left one: then the messages in it were not sent, and "
    "torch.distributed drops calls over this group from now on; destroy it and make another";

// Of a message that goes when the block of coalesced calls ends in which it is.
class UnsentWork final : public c10d::Work {
 public:
  using c10d::Work::Work;
  bool isCompleted() override { return refuse(); }
  bool wait(std::chrono::milliseconds) override { return refuse(); }

 private:
  [[noreturn]] static bool refuse() {
    TORCH_CHECK(false,
                "this message goes at the end of a block of coalesced calls, which returns "
                "the work to wait for. ",
                kLeft);
  }
};

// Works that are waited for together.
class CoalescedWork final : public c10d::Work {
 public:
  explicit CoalescedWork(std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// Thread-safe, as far as the carrier is.
class DeviceSide {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Carrier = c10::intrusive_ptr<c10d::Backend>;
  using Move = std::function<WorkPointer(c10d::Backend&)>;

  // `object`: Python's; the caller holds the GIL.
  explicit DeviceSide(pybind11::object object);

  // The Python object. The caller holds the GIL.
  const pybind11::object& object() const { return object_.get(); }

  bool take(const at::Tensor& tensor) const {
    return tensor.defined() && (takes_cpu_ ? tensor.device().is_cpu() : tensor.device().is_cuda());
  }
  bool take(const std::vector<at::Tensor>& tensors) const {
    return !tensors.empty() && take(tensors.front());
  }
  // Tests alone say so: CPU tensors stand in for those of a device.
  bool takes_cpu() const { return takes_cpu_; }
  // Whether there may be tensors on devices at all.
  bool may_come() const;

  // Whether the carrier's reduction has one result in whatever order.
  static bool is_exact(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op);

  // What carries, made now if it is not there. `bound`: the group's device, if torch was told.
  Carrier carrier(std::optional<at::Device> bound);
  // Null where none has been made, here or by Python.
  Carrier made(std::optional<at::Device> bound);

  void set_timeout(double seconds);
  void abort();
  void shutdown();

 private:
  // What Python's method returns, and keeps, if it is not known here.
  Carrier known_or(const char* method, std::optional<at::Device> bound);

  const PythonObject object_;
  bool takes_cpu_ = false;
  std::mutex mutex_;
  Carrier carrier_;
};

}  // namespace pycollective::shim
