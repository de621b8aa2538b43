#include "bindings/cuda_py.h"

#include <pybind11/stl.h>

#include <exception>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "cuda/driver.h"
#include "cuda/images.h"

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
}

}  // namespace pycollective
