#include "bindings/pack_py.h"

#include <stdexcept>
#include <string>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "bindings/kernels_py.h"
#include "kernels/pack/pack.h"

namespace py = pybind11;

namespace pycollective {
namespace {

enum class Use { kRead, kWritten };

void open(ArrayView& view, const py::object& array, const char* name, Use use, bool bytes) {
  if (!view.open(array.ptr(), name)) throw py::error_already_set();
  if (use == Use::kWritten && !view.check_writable(array.ptr(), name))
    throw py::error_already_set();
  if (!view.contiguous()) throw std::invalid_argument(std::string(name) + " must be contiguous");
  if (bytes && view.dtype() != Dtype::kUInt8)
    throw std::invalid_argument(std::string(name) + " must be of uint8");
}

void check_apart(const ArrayView& from, const ArrayView& out) {
  const auto* const a = static_cast<const std::byte*>(from.data());
  const auto* const b = static_cast<const std::byte*>(out.data());
  const std::size_t bytes = from.count() * size_of(from.dtype());
  const std::size_t room = out.count() * size_of(out.dtype());
  if (bytes != 0 && room != 0 && a < b + room && b < a + bytes)
    throw std::invalid_argument("out must not overlap what is read");
}

Packing packing_of(Dtype dtype, const std::string& simd) {
  const Packing packing = find_packing(dtype, level_named(simd));
  if (packing.pack == nullptr)
    throw std::invalid_argument(std::string("there is no packing of ") + name_of(dtype));
  return packing;
}

std::size_t pack_into(const py::object& x, const py::object& out, const std::string& simd) {
  ArrayView from, to;
  open(from, x, "x", Use::kRead, false);
  open(to, out, "out", Use::kWritten, true);
  check_apart(from, to);
  const Packing packing = packing_of(from.dtype(), simd);
  const std::size_t bound = pack_bound(from.dtype(), from.count());
  if (to.count() < bound)
    throw std::invalid_argument("out must have room for " + std::to_string(bound) + " bytes");
  return packing.pack(from.data(), from.count(), static_cast<std::byte*>(to.data()));
}

void unpack_into(const py::object& payload, const py::object& out, const std::string& simd) {
  ArrayView from, to;
  open(from, payload, "payload", Use::kRead, true);
  open(to, out, "out", Use::kWritten, false);
  check_apart(from, to);
  const Packing packing = packing_of(to.dtype(), simd);
  const auto* bytes = static_cast<const std::byte*>(from.data());
  if (!packing.unpack(bytes, from.count(), to.data(), to.count()))
    throw std::invalid_argument(std::to_string(from.count()) + " bytes that are no payload of " +
                                std::to_string(to.count()) + " elements");
}

}  // namespace

void bind_pack(py::module_& module) {
  module.def(
      "pack_into", or_raise(pack_into), py::arg("x"), py::arg("out"), py::arg("simd") = "",
      "Pack an array of float16, bfloat16 or float32 into one of uint8 with room for as many "
      "bytes, at a SIMD level, as messages to other hosts are packed (docs/wire.md); how "
      "many bytes it took.");
  module.def("unpack_into", or_raise(unpack_into), py::arg("payload"), py::arg("out"),
             py::arg("simd") = "",
             "The inverse of pack_into, for the exact bytes of a payload; ConfigurationError for "
             "any others.");
}

}  // namespace pycollective
