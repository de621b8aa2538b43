// pycollective._core: the native core, as Python sees it.
#include <pybind11/pybind11.h>

#include "bindings/array_view.h"
#include "bindings/communicator_py.h"
#include "bindings/cuda_py.h"
#include "bindings/device_group_py.h"
#include "bindings/device_memory_py.h"
#include "bindings/errors_py.h"
#include "bindings/kernels_py.h"
#include "bindings/leaving_py.h"
#include "bindings/link_py.h"
#include "bindings/machine_py.h"
#include "bindings/node_py.h"
#include "bindings/program_py.h"
#include "bindings/quantize_py.h"
#include "bindings/sparse_py.h"
#include "bindings/traits_py.h"
#include "bindings/work_py.h"

PYBIND11_MODULE(_core, module) {
  using namespace pycollective;
  module.doc() = "The native core of pycollective.";
  if (!init_errors() || !init_array_view()) throw pybind11::error_already_set();
  bind_traits(module);
  bind_kernels(module);
  bind_quantize(module);
  bind_sparse(module);
  bind_node(module);
  bind_program(module);
  bind_link(module);
  bind_work(module);
  bind_communicator(module);
  bind_leaving(module);
  bind_machine(module);
  bind_cuda(module);
  bind_device_memory(module);
  bind_device_group(module);
}
