#include "bindings/cuda_py.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

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
    py::dict found("driver"_a = driver.library, "version"_a = driver.version,
                   "devices"_a = devices);
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

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_report", &report, py::arg("nvrtc_folders"),
             "What there is of CUDA: `driver`, its `version`, `devices` (name, major, minor), "
             "`images` of the kernels; or `no driver`, `no images`: why, and the cure. Initialises "
             "CUDA in this process.");
}

}  // namespace pycollective
