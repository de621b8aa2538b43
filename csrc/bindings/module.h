// What each file of bindings puts into pycollective._core.
#pragma once

#include <pybind11/pybind11.h>

namespace pycollective {

void bind_traits(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_node(pybind11::module_& module);
void bind_program(pybind11::module_& module);
void bind_link(pybind11::module_& module);
void bind_work(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
void bind_shutdown(pybind11::module_& module);
void bind_machine(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_device_group(pybind11::module_& module);

}  // namespace pycollective
