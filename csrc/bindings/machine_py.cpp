#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>

#include "bench/core_to_core.h"
#include "bench/stream.h"
#include "bindings/gil.h"
#include "bindings/module.h"
#include "engine/api.h"

namespace py = pybind11;

namespace pycollective {
namespace {

template <class Table>
const auto& row_named(const Table& table, const std::string& name, const char* what) {
  if (const auto* found = find_named(table, name)) return *found;
  throw std::invalid_argument("unknown " + std::string(what) + " " + name);
}

py::buffer_info writable_bytes(const py::buffer& buffer) {
  py::buffer_info info = buffer.request(true);
  if (info.itemsize != 1 || info.ndim != 1 || (info.size > 0 && info.strides[0] != 1))
    throw std::invalid_argument("the buffer must be one-dimensional contiguous bytes");
  return info;
}

double stream(const py::buffer& buffer, int repetitions) {
  const py::buffer_info info = writable_bytes(buffer);
  const GilReleased unlocked;
  return stream_in_place(static_cast<std::uint8_t*>(info.ptr), static_cast<std::size_t>(info.size),
                         repetitions);
}

double time_collective(const py::capsule& capsule, const std::string& kind,
                       const std::string& dtype, const std::string& reduce_op, int root,
                       const py::buffer& input, const py::buffer& output, std::size_t count,
                       int repetitions) {
  if (std::string(kCapsuleName) != (capsule.name() != nullptr ? capsule.name() : ""))
    throw std::invalid_argument("not the capsule of a communicator");
  const std::shared_ptr<Collectives> collectives =
      *capsule.get_pointer<std::shared_ptr<Collectives>>();
  const py::buffer_info from = writable_bytes(input);
  const py::buffer_info to = writable_bytes(output);
  Request request;
  request.kind = row_named(kOperationTable, kind, "operation").kind;
  request.dtype = row_named(kDtypeTable, dtype, "dtype").dtype;
  request.reduce_op = row_named(kReduceOpTable, reduce_op, "reduce operation").op;
  request.root = root;
  request.input = from.ptr;
  request.output = to.ptr;
  request.count = count;
  const InterruptHook interrupted;
  const GilReleased unlocked;
  const auto start = std::chrono::steady_clock::now();
  for (int repetition = 0; repetition < repetitions; ++repetition)
    collectives->run(request, interrupted);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void bind_machine(py::module_& module) {
  module.def("stream_in_place", &stream, py::arg("buffer"), py::arg("repetitions"),
             "Add one to every byte of `buffer` (1-D uint8), `repetitions` times; seconds.");
  module.def("core_to_core_latency", &core_to_core_latency, py::arg("cpu_a"), py::arg("cpu_b"),
             py::arg("round_trips"), py::call_guard<GilReleased>(),
             "One-way latency between two cores, in seconds.");
  module.def("core_to_core_copy", &core_to_core_copy, py::arg("cpu_a"), py::arg("cpu_b"),
             py::arg("total"), py::arg("chunk"), py::call_guard<GilReleased>(),
             "Seconds for each of two cores to copy `total` bytes that the other has just written, "
             "both at once, `chunk` bytes at a time; only the copying counts.");
  module.def("time_collective", &time_collective, py::arg("capsule"), py::arg("kind"),
             py::arg("dtype"), py::arg("reduce_op"), py::arg("root"), py::arg("input"),
             py::arg("output"), py::arg("count"), py::arg("repetitions"),
             "Seconds for `repetitions` synchronous calls of one operation, with no Python between "
             "them. Buffers are 1-D uint8; `count` is as in csrc/engine/api.h.");
}

}  // namespace pycollective
