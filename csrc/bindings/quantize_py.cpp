#include "bindings/quantize_py.h"

#include <pybind11/stl.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "bindings/kernels_py.h"
#include "kernels/quantize/quantize.h"

namespace py = pybind11;

namespace pycollective {
namespace {

const QuantizeCodec& codec_named(const std::string& name, SimdLevel level) {
  const QuantizeCodecs codecs = quantize_codecs(level);
  std::string names;
  for (const QuantizeCodec& each : codecs) {
    if (name == each.name) return each;
    names += &each == codecs.begin() ? "" : &each + 1 == codecs.end() ? " and " : ", ";
    names += each.name;
  }
  throw std::invalid_argument("no codec '" + name + "'; there are " + names);
}

std::vector<std::string> codecs() {
  std::vector<std::string> names;
  for (const QuantizeCodec& each : quantize_codecs(SimdLevel::kPortable))
    names.emplace_back(each.name);
  return names;
}

std::size_t checked_chunk(long long chunk) {
  if (chunk < 0 || !is_chunk(static_cast<std::size_t>(chunk)))
    throw std::invalid_argument("a chunk is a multiple of " + std::to_string(kLeastChunk) +
                                " elements up to " + std::to_string(kMostChunk) + ", not " +
                                std::to_string(chunk));
  return static_cast<std::size_t>(chunk);
}

// An argument that is open: its bytes, and what to call it in messages.
struct Argument : ArrayView {
  Argument(const py::object& array, const char* name, bool written) : name(name) {
    if (!open(array.ptr(), name)) throw py::error_already_set();
    if (!contiguous()) throw std::invalid_argument(std::string(name) + " must be contiguous");
    if (written && !check_writable(array.ptr(), name)) throw py::error_already_set();
  }
  std::size_t bytes() const { return count() * size_of(dtype()); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data());
  }
  void must_be(Dtype wanted) const {
    if (dtype() != wanted)
      throw std::invalid_argument(std::string(name) + " must be of " + name_of(wanted) + ", not " +
                                  name_of(dtype()));
  }
  void must_have(std::size_t wanted) const {
    if (count() != wanted)
      throw std::invalid_argument(std::string(name) + " must have " + std::to_string(wanted) +
                                  " elements, not " + std::to_string(count()));
  }
  void must_not_overlap(const Argument& other) const {
    const std::less<const std::byte*> before;
    const auto *mine = as<const std::byte>(), *its = other.as<const std::byte>();
    if (bytes() != 0 && other.bytes() != 0 && before(mine, its + other.bytes()) &&
        before(its, mine + bytes()))
      throw std::invalid_argument(std::string(name) + " must not overlap " + other.name);
  }

  const char* name;
};

Quantizing quantizing_of(const QuantizeCodec& codec, Dtype dtype) {
  const Quantizing found = codec.find(dtype);
  if (found.quantize == nullptr)
    throw std::invalid_argument(std::string("there is no quantization of ") + name_of(dtype));
  return found;
}

std::size_t payload_bytes(const std::string& codec, long long chunk, long long count) {
  constexpr long long kMost = 1LL << 56;
  if (count < 0 || count > kMost)
    throw std::invalid_argument("no array has " + std::to_string(count) + " elements");
  return quantized_bytes(codec_named(codec, SimdLevel::kPortable), checked_chunk(chunk),
                         static_cast<std::size_t>(count));
}

bool quantize(const std::string& codec_name, long long chunk_size, const py::object& x,
              const py::object& held, const py::object& left, const py::object& payload,
              const std::string& simd) {
  const QuantizeCodec& codec = codec_named(codec_name, level_named(simd));
  const std::size_t chunk = checked_chunk(chunk_size);
  const Argument from(x, "x", false), errors(left, "left", true), to(payload, "payload", true);
  const Quantizing quantizing = quantizing_of(codec, from.dtype());
  const std::size_t count = from.count();
  errors.must_be(Dtype::kFloat32);
  errors.must_have(count);
  to.must_be(Dtype::kUInt8);
  if (const std::size_t needed = quantized_bytes(codec, chunk, count); to.count() < needed)
    throw std::invalid_argument("payload must have room for " + std::to_string(needed) +
                                " bytes, and has " + std::to_string(to.count()));
  errors.must_not_overlap(from);
  errors.must_not_overlap(to);
  to.must_not_overlap(from);
  const auto run = [&](const float* before) {
    const GilReleased released;
    const FloatEnvironment ieee;
    return quantizing.quantize(from.data(), before, errors.as<float>(), count, chunk,
                               to.as<std::byte>());
  };
  if (held.is_none()) return run(nullptr);
  const Argument before(held, "held", false);
  before.must_be(Dtype::kFloat32);
  before.must_have(count);
  errors.must_not_overlap(before);
  to.must_not_overlap(before);
  return run(before.as<const float>());
}

void dequantize(const std::string& codec_name, long long chunk_size, const py::object& messages,
                long long at, const py::object& out, double divisor, const std::string& simd) {
  const QuantizeCodec& codec = codec_named(codec_name, level_named(simd));
  const std::size_t chunk = checked_chunk(chunk_size);
  const Argument from(messages, "messages", false), to(out, "out", true);
  from.must_be(Dtype::kUInt8);
  const Quantizing quantizing = quantizing_of(codec, to.dtype());
  if (from.dimensions() != 2 || from.extent(0) < 1 || from.extent(0) > kCountableRanks)
    throw std::invalid_argument("messages must be a row for each rank, 1 to " +
                                std::to_string(kCountableRanks) + " of them");
  const std::size_t rows = from.extent(0), stride = from.extent(1);
  const std::size_t needed = quantized_bytes(codec, chunk, to.count());
  if (at < 0 || static_cast<std::size_t>(at) > stride ||
      stride - static_cast<std::size_t>(at) < needed)
    throw std::invalid_argument("messages of " + std::to_string(stride) + " bytes do not hold " +
                                std::to_string(needed) + " from byte " + std::to_string(at) +
                                " on");
  const auto divide = static_cast<float>(divisor);
  if (!(divide > 0 && std::isfinite(divide)))
    throw std::invalid_argument("divisor must be a finite fp32 above 0");
  to.must_not_overlap(from);
  const GilReleased released;
  const FloatEnvironment ieee;
  quantizing.dequantize(from.as<const std::byte>() + at, rows, stride, chunk, to.data(), to.count(),
                        divide);
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("quantize_codecs", codecs,
             "No part of the API: the names of the codecs that quantize() knows.");
  module.def("quantized_bytes", or_raise(payload_bytes), py::arg("codec"), py::arg("chunk"),
             py::arg("count"),
             "No part of the API: bytes of the payload of so many elements, by a codec "
             "with a scale for each `chunk` of them. docs/wire.md says which.");
  module.def("quantize", or_raise(quantize), py::arg("codec"), py::arg("chunk"), py::arg("x"),
             py::arg("held"), py::arg("left"), py::arg("payload"), py::arg("simd") = "",
             "No part of the API: quantize x + held, arrays alike in count (x of float16, "
             "bfloat16 or float32, held of float32 or None), into `payload`, of uint8 with room "
             "for quantized_bytes(), and what that leaves into `left`, of float32. False where a "
             "number is not finite; both then hold anything.");
  module.def("dequantize", or_raise(dequantize), py::arg("codec"), py::arg("chunk"),
             py::arg("messages"), py::arg("at"), py::arg("out"), py::arg("divisor"),
             py::arg("simd") = "",
             "No part of the API: add up payloads in the contract's order, each from byte `at` "
             "on in a row of `messages`, divide by `divisor` and round once into `out`, of "
             "float16, bfloat16 or float32.");
}

}  // namespace pycollective
