// What there is of CUDA, its kernels, and memory and streams of a GPU.
#include <pybind11/stl.h>
#include <sched.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bindings/array_protocols.h"
#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "cuda/driver.h"
#include "cuda/gpu.h"
#include "cuda/images.h"
#include "per_process.h"
#include "types.h"

namespace py = pybind11;

namespace pycollective {
namespace {

py::dict report(const std::vector<std::string>& nvrtc_folders) {
  using namespace py::literals;
  try {
    const cuda::Driver& driver = cuda::driver();
    py::list devices;
    for (int ordinal = 0; ordinal < driver.devices; ++ordinal) {
      const cuda::DeviceTraits device = cuda::device_traits(ordinal);
      devices.append(py::make_tuple(device.name, device.major, device.minor));
    }
    py::list apart;
    for (int one = 0; one < driver.devices; ++one)
      for (int other = 0; other < one; ++other)
        if (!cuda::can_access(one, other) || !cuda::can_access(other, one))
          apart.append(py::make_tuple(other, one));
    py::dict found("driver"_a = driver.library, "version"_a = driver.version, "devices"_a = devices,
                   "apart"_a = apart);
    try {
      found["images"] = cuda::describe_images(driver.version, nvrtc_folders);
    } catch (const std::runtime_error& error) {
      found["no images"] = error.what();
    }
    return found;
  } catch (const std::runtime_error& error) {  // DriverUnavailable, DriverError
    py::dict missing;
    missing["no driver"] = error.what();
    return missing;
  }
}

void prepare(const std::vector<std::string>& nvrtc_folders, std::optional<int> device) {
  translated([&] {
    const GilReleased unlocked;
    const cuda::Driver& driver = cuda::driver();
    std::set<std::pair<int, int>> kinds;
    std::exception_ptr failure;  // the first: of one kind, while another is needed
    for (int ordinal = 0; ordinal < driver.devices; ++ordinal) {
      if (device.value_or(ordinal) != ordinal) continue;
      try {
        const cuda::DeviceTraits traits = cuda::device_traits(ordinal);
        if (kinds.emplace(traits.major, traits.minor).second)
          cuda::prepare_images({traits.major, traits.minor, driver.version}, nvrtc_folders);
      } catch (const std::runtime_error&) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  });
}

using cuda::check;
using cuda::CUcontext;
using cuda::CUdeviceptr;
using cuda::CUresult;
using cuda::Current;
using cuda::CUstream;
using cuda::driver;

constexpr double kWait = 60;  // seconds, for what is on a stream beside a copy
constexpr std::size_t kWord = 4;

struct TimedOut : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `act` without the GIL. A failure of the driver's is a RuntimeError, with its words; what is
// wrong with the call, or no driver at all, is a ConfigurationError.
template <class Act>
auto driven(const Act& act) {
  return translated([&] {
    try {
      const GilReleased unlocked;
      return act();
    } catch (const cuda::DriverError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
      throw;
    } catch (const TimedOut& error) {
      PyErr_SetString(PyExc_TimeoutError, error.what());
      throw;
    }
  });
}

bool is_done(CUstream stream) {
  const CUresult result = driver().cuStreamQuery(stream);
  if (result == cuda::CUDA_ERROR_NOT_READY) return false;
  check(result, "cuStreamQuery");
  return true;
}

// Until all that is on the stream is done; the context is current. At first it looks without a
// pause, because the end of a collective is timed by it.
void wait_for(CUstream stream, double timeout) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  auto asked = start;  // Python, for signals
  while (!is_done(stream)) {
    const auto now = Clock::now();
    const double waited = std::chrono::duration<double>(now - start).count();
    if (!(waited < timeout))
      throw TimedOut("the stream has not come to its end in " + std::to_string(timeout) + " s");
    if (now - asked > std::chrono::milliseconds(50)) {
      asked = now;
      if (python_interrupts()()) throw std::runtime_error("interrupted");  // Python knows by what
    }
    if (waited < 0.001)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Runs `release` at an object's end, which may come by any thread, and may wait for the GPU.
template <class Release>
void at_the_end(const ForkGuard& guard, CUcontext context, const Release& release) {
  if (guard.forked()) return;
  const auto act = [&] {
    try {
      const Current current(context);
      release();
    } catch (const cuda::DriverError&) {
      // The context is gone, or has failed: nothing is left to be released.
    }
  };
  if (Py_IsInitialized() && PyGILState_Check()) {
    const GilReleased unlocked;
    act();
  } else {
    act();
  }
}

// Memory of one device, as its views and capsules share it.
class Allocation {
 public:
  Allocation(int device, std::size_t size)
      : device_(device), size_(size), context_(cuda::Gpu::at(device).context()) {
    const Current current(context_);
    check(driver().cuMemAlloc(&address_, size == 0 ? 1 : size), "cuMemAlloc");
  }
  ~Allocation() {
    at_the_end(guard_, context_, [this] { static_cast<void>(driver().cuMemFree(address_)); });
  }
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int device() const { return device_; }
  std::size_t size() const { return size_; }
  CUdeviceptr address() const { return address_; }

  void* at(std::size_t offset, std::size_t size) const {
    if (offset > size_ || size > size_ - offset)
      throw std::invalid_argument(std::to_string(size) + " bytes from " + std::to_string(offset) +
                                  " on are not in an allocation of " + std::to_string(size_));
    return reinterpret_cast<void*>(address_ + offset);
  }

  // Both done when they return. Copies of pageable memory wait in the driver for all that is on the
  // stream, without an end: so they begin when there is nothing.
  void write(std::size_t offset, const void* from, std::size_t size, CUstream stream) const {
    copy(reinterpret_cast<CUdeviceptr>(at(offset, size)), reinterpret_cast<CUdeviceptr>(from), size,
         stream);
  }
  void read(void* to, std::size_t offset, std::size_t size, CUstream stream) const {
    copy(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(at(offset, size)), size,
         stream);
  }

  void fill(std::uint32_t word, CUstream stream) const {
    {
      const Current current(context_);
      if (size_ >= kWord)
        check(driver().cuMemsetD32Async(address_, word, size_ / kWord, stream), "cuMemsetD32Async");
      wait_for(stream, kWait);
    }
    write(size_ - size_ % kWord, &word, size_ % kWord, stream);
  }

 private:
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t size, CUstream stream) const {
    if (size == 0) return;
    const Current current(context_);
    wait_for(stream, kWait);
    check(driver().cuMemcpyAsync(to, from, size, stream), "cuMemcpyAsync");
    wait_for(stream, kWait);
  }

  int device_;
  std::size_t size_;
  CUcontext context_;
  CUdeviceptr address_ = 0;
  ForkGuard guard_;
};

class DeviceStream {
 public:
  DeviceStream(int device, bool non_blocking)
      : device_(device), context_(cuda::Gpu::at(device).context()) {
    const Current current(context_);
    check(driver().cuStreamCreate(&stream_,
                                  non_blocking ? unsigned{cuda::CU_STREAM_NON_BLOCKING} : 0),
          "cuStreamCreate");
  }
  ~DeviceStream() {
    at_the_end(guard_, context_, [this] { static_cast<void>(driver().cuStreamDestroy(stream_)); });
  }
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  int device() const { return device_; }
  std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(stream_); }
  bool query() const {
    const Current current(context_);
    return is_done(stream_);
  }
  void synchronize(double timeout) const {
    const Current current(context_);
    wait_for(stream_, timeout);
  }

 private:
  int device_;
  CUcontext context_;
  CUstream stream_ = nullptr;
  ForkGuard guard_;
};

using Memory = std::shared_ptr<Allocation>;

CUstream stream_of(std::uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }

void write(const Memory& self, const py::buffer& buffer, std::size_t offset,
           std::uintptr_t stream) {
  Py_buffer bytes;
  if (PyObject_GetBuffer(buffer.ptr(), &bytes, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const std::unique_ptr<Py_buffer, void (*)(Py_buffer*)> released(&bytes, PyBuffer_Release);
  driven([&] {
    self->write(offset, bytes.buf, static_cast<std::size_t>(bytes.len), stream_of(stream));
  });
}

py::bytes read(const Memory& self, std::size_t offset, std::size_t nbytes, std::uintptr_t stream) {
  translated([&] { self->at(offset, nbytes); });  // before room is made for it
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes));
  if (made == nullptr) throw py::error_already_set();
  const auto bytes = py::reinterpret_steal<py::bytes>(made);
  char* const to = PyBytes_AS_STRING(made);
  driven([&] { self->read(to, offset, nbytes, stream_of(stream)); });
  return bytes;
}

py::object dlpack_capsule(const Memory& self, std::size_t offset,
                          const std::vector<std::int64_t>& shape, const std::string& dtype,
                          bool versioned) {
  return translated([&] {
    const DtypeTraits* const traits = find_named(kDtypeTable, dtype);
    if (traits == nullptr)
      throw std::invalid_argument("no dtype '" + dtype + "'; there are " + list_names(kDtypeTable));
    std::size_t size = traits->size;
    for (const std::int64_t extent : shape) {
      if (extent < 0) throw std::invalid_argument("an extent below 0");
      if (__builtin_mul_overflow(size, static_cast<std::size_t>(extent), &size))
        throw std::invalid_argument("a shape of more bytes than there can be");
    }
    const dlpack::DataType type = {static_cast<std::uint8_t>(traits->dlpack),
                                   static_cast<std::uint8_t>(8 * traits->size), 1};
    PyObject* const made = dlpack::make_capsule(
        {self->at(offset, size), {dlpack::kCuda, self->device()}, type, shape}, self, versioned);
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
  });
}

int device_count() {
  return driven([] { return driver().devices; });
}

void bind_memory(py::module_& module) {
  py::class_<Allocation, Memory>(module, "DeviceMemory", py::is_final(),
                                 "`nbytes` of GPU `device`, until the last view or capsule goes. "
                                 "Copies are done when a call returns. ConfigurationError: no such "
                                 "GPU, no driver, or bytes outside; RuntimeError: the driver's.")
      .def(py::init([](int device, std::size_t nbytes) {
             return driven([&] { return std::make_shared<Allocation>(device, nbytes); });
           }),
           py::arg("device"), py::arg("nbytes"))
      .def_property_readonly("address", &Allocation::address)
      .def_property_readonly("nbytes", &Allocation::size)
      .def_property_readonly("device", &Allocation::device)
      .def("write", &write, py::arg("buffer"), py::arg("offset") = 0, py::arg("stream") = 0,
           "Copy a contiguous buffer to `offset` on, after what is on the stream (a handle).")
      .def("read", &read, py::arg("offset"), py::arg("nbytes"), py::arg("stream") = 0,
           "These bytes, after what is on the stream.")
      .def(
          "fill",
          [](const Memory& self, std::uint32_t word, std::uintptr_t stream) {
            driven([&] { self->fill(word, stream_of(stream)); });
          },
          py::arg("word"), py::arg("stream") = 0, "Repeat the 32 bits all over it.")
      .def("capsule", &dlpack_capsule, py::arg("offset"), py::arg("shape"), py::arg("dtype"),
           py::arg("versioned") = true,
           "A DLPack capsule of a C-contiguous array that begins at byte `offset`, of any "
           "alignment; the memory lives as long as the capsule, or what a consumer makes of it.");
}

void bind_stream(py::module_& module) {
  py::class_<DeviceStream>(module, "DeviceStream", py::is_final(), "A stream of GPU `device`.")
      .def(py::init([](int device, bool non_blocking) {
             return driven([&] { return std::make_unique<DeviceStream>(device, non_blocking); });
           }),
           py::arg("device"), py::arg("non_blocking") = true)
      .def_property_readonly("device", &DeviceStream::device)
      .def_property_readonly("handle", &DeviceStream::handle)
      .def_property_readonly("ptr", &DeviceStream::handle, "The handle, as CuPy calls it.")
      .def("__cuda_stream__",
           [](const DeviceStream& self) { return py::make_tuple(0, self.handle()); })
      .def(
          "query", [](const DeviceStream& self) { return driven([&] { return self.query(); }); },
          "Whether all that is on it is done.")
      .def(
          "synchronize",
          [](const DeviceStream& self, double timeout) {
            driven([&] { self.synchronize(timeout); });
          },
          py::arg("timeout"),
          "Wait until all that is on it is done, up to `timeout` seconds. Raises TimeoutError.");
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_report", &report, py::arg("nvrtc_folders"),
             "What there is of CUDA: `driver`, its `version`, `devices` (name, major, minor), "
             "`apart` (pairs of GPUs that cannot map each other), `images` of the kernels; or `no "
             "driver`, `no images`: why, and the cure. Initialises "
             "CUDA in this process.");
  module.def("prepare_kernels", &prepare, py::arg("nvrtc_folders"), py::arg("device"),
             "Have NVRTC compile what nvcc did not, for this GPU or, without one, for each kind of "
             "GPU that there is. What does not compile, whoever loads it is told. "
             "ConfigurationError: there is no CUDA, or no NVRTC.");
  bind_memory(module);
  bind_stream(module);
  module.def("device_count", &device_count,
             "How many GPUs the driver has, at least 1. ConfigurationError: there is no driver, or "
             "no GPU. Initialises CUDA in this process.");
}

}  // namespace pycollective
