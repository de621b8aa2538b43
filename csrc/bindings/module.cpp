// pycollective._core: the native core, as Python sees it.
#include "bindings/module.h"

#include "bindings/array_view.h"
#include "bindings/errors_py.h"

PYBIND11_MODULE(_core, module) {
  using namespace pycollective;
  module.doc() = "The native core of pycollective.";
  if (!init_errors() || !init_array_view()) throw pybind11::error_already_set();
  bind_traits(module);
  bind_kernels(module);
  bind_node(module);
  bind_program(module);
  bind_link(module);
  bind_work(module);
  bind_communicator(module);
  bind_shutdown(module);
  bind_machine(module);
  bind_cuda(module);
  bind_device_group(module);
}
