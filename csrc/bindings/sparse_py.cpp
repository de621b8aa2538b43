#include "bindings/sparse_py.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "bindings/kernels_py.h"
#include "kernels/sparse/sparse.h"

namespace py = pybind11;

namespace pycollective {
namespace {

constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32;
constexpr std::int64_t kMostKey = 0x7FFFFFFF;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// An array of the caller's, contiguous, for as long as this lives.
class Array {
 public:
  Array(const py::object& object, const char* name, bool written) : name_(name), object_(object) {
    // The table of element types, which is the contract's, has no uint32: as int32, the same bits.
    if (py::isinstance<py::array_t<std::uint32_t>>(object)) object_ = object.attr("view")("int32");
    if (!view_->open(object_.ptr(), name)) throw py::error_already_set();
    if (!view_->contiguous()) refuse(name_ + " must be contiguous");
    if (written && !view_->check_writable(object_.ptr(), name)) throw py::error_already_set();
    if (count() >= kMostElements) refuse(name_ + " must have fewer than 2**32 elements");
  }

  Dtype dtype() const { return view_->dtype(); }
  std::size_t count() const { return view_->count(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(view_->data());
  }

  const Array& of(Dtype dtype, const char* called = nullptr) const {
    if (this->dtype() != dtype)
      refuse(name_ + " must be of " + (called != nullptr ? called : name_of(dtype)) + ", not " +
             name_of(this->dtype()));
    return *this;
  }
  const Array& of_indices() const { return of(Dtype::kInt32, "uint32 (or int32, as its bits)"); }
  const Array& of_floats() const {
    if (dtype() == Dtype::kFloat32 || dtype() == Dtype::kFloat16 || dtype() == Dtype::kBFloat16)
      return *this;
    refuse(name_ + " must be of float32, float16 or bfloat16, not " + name_of(dtype()));
  }
  // Values that travel: NumPy alone has no bfloat16, so an int16 is one's bits.
  Dtype value_dtype() const { return dtype() == Dtype::kInt16 ? Dtype::kBFloat16 : dtype(); }
  const Array& of_values() const { return dtype() == Dtype::kInt16 ? *this : of_floats(); }
  const Array& long_as(const Array& other) const {
    if (count() != other.count())
      refuse(name_ + " must have as many elements as " + other.name_ + ": " +
             std::to_string(other.count()) + ", not " + std::to_string(count()));
    return *this;
  }
  const Array& room_for(std::uint64_t needed) const {
    if (count() < needed)
      refuse(name_ + " must have room for " + std::to_string(needed) + ", not " +
             std::to_string(count()));
    return *this;
  }
  const Array& apart_from(const Array& other) const {
    if (count() == 0 || other.count() == 0) return *this;
    const auto* const a = as<std::byte>();
    const auto* const b = other.as<std::byte>();
    if (a < b + other.count() * size_of(other.dtype()) && b < a + count() * size_of(dtype()))
      refuse(name_ + " must not overlap " + other.name_);
    return *this;
  }

 private:
  std::string name_;
  py::object object_;
  std::unique_ptr<ArrayView> view_ = std::make_unique<ArrayView>();
};

// Runs a kernel: without Python's lock, with IEEE's defaults.
template <class Function>
auto run(Function function) {
  const GilReleased released;
  const FloatEnvironment ieee;
  return function();
}

// x, held and left, checked.
class Opened {
 public:
  Opened(const py::object& x, const py::object& held, const py::object& left)
      : x_(x, "x", false), left_(left, "left", true) {
    x_.of_floats();
    left_.of(Dtype::kFloat32).long_as(x_);
    if (left_.as<void>() != x_.as<void>()) left_.apart_from(x_);
    if (held.is_none()) return;
    held_.emplace(held, "held", false);
    held_->of(Dtype::kFloat32).long_as(x_);
    left_.apart_from(*held_);
  }
  std::size_t count() const { return x_.count(); }
  void apart_from(const Array& indices) const {
    indices.apart_from(x_).apart_from(left_);
    if (held_) indices.apart_from(*held_);
  }
  Gradient gradient() const {
    return {x_.dtype(), x_.as<void>(), held_ ? held_->as<float>() : nullptr, left_.as<float>(),
            count()};
  }

 private:
  Array x_, left_;
  std::optional<Array> held_;
};

std::uint64_t size_from(std::int64_t size) {
  if (size < 0 || static_cast<std::uint64_t>(size) > kMostElements)
    refuse("size must be 0 to 2**32, not " + std::to_string(size));
  return static_cast<std::uint64_t>(size);
}

bool sparse_add(const py::object& x, const py::object& held, const py::object& left,
                const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Opened opened(x, held, left);
  return run([&] { return sparse.add(opened.gradient()); });
}

std::int64_t top_k(const py::object& x, const py::object& held, const py::object& left,
                   std::int64_t k, const py::object& indices, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Opened opened(x, held, left);
  if (k < 0 || static_cast<std::uint64_t>(k) > opened.count())
    refuse("k must be 0 to " + std::to_string(opened.count()) + ", the elements, not " +
           std::to_string(k));
  const auto wanted = static_cast<std::size_t>(k);
  const Array out(indices, "indices", true);
  out.of_indices().room_for(wanted);
  opened.apart_from(out);
  return run([&] { return sparse.top_k(opened.gradient(), wanted, out.as<std::uint32_t>()); });
}

std::int64_t top_k_chunks(const py::object& x, const py::object& held, const py::object& left,
                          std::int64_t k, std::int64_t chunk, const py::object& indices,
                          const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Opened opened(x, held, left);
  if (chunk < 1 || chunk > std::int64_t{kLargestChunk} || chunk % std::int64_t{kChunkStep} != 0)
    refuse("chunk must be a multiple of 64 up to 65,536, not " + std::to_string(chunk));
  if (k < 1 || k > chunk)
    refuse("k must be 1 to " + std::to_string(chunk) + ", the chunk, not " + std::to_string(k));
  const auto each = static_cast<std::size_t>(k), elements = static_cast<std::size_t>(chunk);
  const Array out(indices, "indices", true);
  out.of_indices().room_for(selected_by_chunk(opened.count(), each, elements));
  opened.apart_from(out);
  return run([&] {
    return sparse.top_k_chunks(opened.gradient(), each, elements, out.as<std::uint32_t>());
  });
}

void sparse_histogram(const py::object& left, int shift, int bits, std::int64_t prefix,
                      const py::object& bins, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array from(left, "left", false), to(bins, "bins", true);
  from.of(Dtype::kFloat32);
  to.of(Dtype::kInt64);
  if (shift < 0 || bits < 1 || shift > 31 || bits > 31 - shift)
    refuse("shift must be 0 or more, bits 1 or more, and both together at most 31");
  if (prefix < 0 || prefix > kMostKey) refuse("prefix must be 0 to 2**31 - 1");
  if (to.count() != std::size_t{1} << bits) refuse("bins must have 2**bits elements");
  to.apart_from(from);
  run([&] {
    sparse.histogram(from.as<float>(), from.count(), shift, bits,
                     static_cast<std::uint32_t>(prefix), to.as<std::int64_t>());
  });
}

std::int64_t sparse_select(const py::object& left, std::int64_t key, std::int64_t ties,
                           const py::object& indices, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array from(left, "left", false), to(indices, "indices", true);
  from.of(Dtype::kFloat32);
  to.of_indices().apart_from(from);
  if (key < 0 || key > kMostKey) refuse("key must be 0 to 2**31 - 1");
  if (ties < 0) refuse("ties must be 0 or more");
  const std::int64_t found = run([&] {
    return sparse.select(from.as<float>(), from.count(), static_cast<std::uint32_t>(key),
                         static_cast<std::size_t>(ties), to.as<std::uint32_t>(), to.count());
  });
  if (found == kNoRoom) refuse("indices has no room for what is selected");
  return found;
}

void sparse_take(const py::object& left, const py::object& indices, const py::object& values,
                 const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array from(left, "left", true), at(indices, "indices", false), to(values, "values", true);
  from.of(Dtype::kFloat32);
  at.of_indices();
  to.of_values().long_as(at);
  to.apart_from(from);
  to.apart_from(at);
  from.apart_from(at);
  const bool good = run([&] {
    if (!sparse.all_below(at.as<std::uint32_t>(), at.count(), from.count())) return false;
    sparse.take(from.as<float>(), at.as<std::uint32_t>(), at.count(), to.value_dtype(),
                to.as<void>());
    return true;
  });
  if (!good) refuse("indices must be below " + std::to_string(from.count()) + ", left's length");
}

std::size_t pack_indices_bound(std::int64_t count, std::int64_t size) {
  if (count < 0) refuse("count must be 0 or more");
  return packed_indices_bound(static_cast<std::size_t>(count), size_from(size));
}

std::size_t pack_indices(const py::object& indices, std::int64_t size, const py::object& out,
                         const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array from(indices, "indices", false), to(out, "out", true);
  from.of_indices();
  const std::uint64_t places = size_from(size);
  to.of(Dtype::kUInt8).room_for(packed_indices_bound(from.count(), places)).apart_from(from);
  const std::size_t bytes = run([&]() -> std::size_t {
    const auto* const at = from.as<std::uint32_t>();
    if (!sparse.ascends(at, from.count(), places)) return 0;
    return sparse.pack(at, from.count(), to.as<std::byte>());
  });
  if (bytes == 0) refuse("indices must ascend strictly and be below " + std::to_string(places));
  return bytes;
}

void unpack_indices(const py::object& payload, std::int64_t size, const py::object& indices,
                    const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array from(payload, "payload", false), to(indices, "indices", true);
  from.of(Dtype::kUInt8);
  to.of_indices().apart_from(from);
  const std::uint64_t places = size_from(size);
  const bool good = run([&] {
    return sparse.unpack(from.as<std::byte>(), from.count(), places, to.as<std::uint32_t>(),
                         to.count());
  });
  if (!good)
    refuse(std::to_string(from.count()) + " bytes that are no payload of " +
           std::to_string(to.count()) + " indices below " + std::to_string(places));
}

std::size_t sparse_sum(const std::vector<py::object>& indices,
                       const std::vector<py::object>& values, const py::object& out_indices,
                       const py::object& out_values, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  if (indices.empty() || indices.size() != values.size())
    refuse("indices and values must be as many, one a rank, and not none");
  const Array to(out_indices, "out_indices", true), sums(out_values, "out_values", true);
  to.of_indices();
  sums.of(Dtype::kFloat32).apart_from(to);
  std::vector<Array> arrays;
  std::vector<SparseVector> vectors;
  arrays.reserve(2 * indices.size());
  std::uint64_t total = 0;
  for (std::size_t r = 0; r < indices.size(); ++r) {
    const Array& at = arrays.emplace_back(indices[r], "a rank's indices", false);
    const Array& of = arrays.emplace_back(values[r], "a rank's values", false);
    at.of_indices();
    of.of_values().of(arrays[1].dtype()).long_as(at);
    for (const Array* out : {&to, &sums}) {
      out->apart_from(at);
      out->apart_from(of);
    }
    vectors.push_back({at.as<std::uint32_t>(), of.as<void>(), at.count()});
    total += at.count();
  }
  to.room_for(total);
  sums.room_for(total);
  std::size_t wrong = vectors.size();
  const std::size_t found = run([&]() -> std::size_t {
    for (std::size_t r = 0; r < vectors.size(); ++r) {
      if (sparse.ascends(vectors[r].indices, vectors[r].count, kMostElements)) continue;
      wrong = r;
      return 0;
    }
    return sparse.sum(vectors.data(), vectors.size(), arrays[1].value_dtype(),
                      to.as<std::uint32_t>(), sums.as<float>());
  });
  if (wrong != vectors.size())
    refuse("rank " + std::to_string(wrong) + "'s indices must ascend strictly");
  return found;
}

void sparse_scatter(const py::object& indices, const py::object& values, const py::object& out,
                    double divisor, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Array at(indices, "indices", false), of(values, "values", false), to(out, "out", true);
  at.of_indices();
  of.of_floats().long_as(at);
  to.of_floats().apart_from(at);
  to.apart_from(of);
  const auto by = static_cast<float>(divisor);
  if (!(by > 0) || by != divisor) refuse("divisor must be a positive number of fp32");
  const bool good = run([&] {
    const SparseVector vector{at.as<std::uint32_t>(), of.as<void>(), at.count()};
    if (!sparse.ascends(vector.indices, vector.count, to.count())) return false;
    sparse.scatter(vector, of.dtype(), by, to.as<void>(), to.count(), to.dtype());
    return true;
  });
  if (!good)
    refuse("indices must ascend strictly and be below " + std::to_string(to.count()) +
           ", the elements of out");
}

// Errors as Python knows them.
template <class Result, class... Arguments>
auto or_raise(Result (*function)(Arguments...)) {
  return [function](Arguments... arguments) -> Result {
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const py::error_already_set&) {
      throw;
    } catch (...) {
      raise_current_exception();
      throw py::error_already_set();
    }
  };
}

}  // namespace

void bind_sparse(py::module_& module) {
  const py::arg x("x"), held("held"), left("left"), k("k"), indices("indices"), values("values");
  const py::arg_v simd(py::arg("simd") = "");
  module.def("top_k", or_raise(top_k), x, held, left, k, indices, simd,
             "No part of the API: left = x + held (None: nothing is held), in float32, and the k "
             "elements of the largest magnitude, of equal ones the first, as ascending uint32 "
             "indices. k, or -1 where an element of x + held is not finite (left and indices then "
             "hold anything).");
  module.def("top_k_chunks", or_raise(top_k_chunks), x, held, left, k, py::arg("chunk"), indices,
             simd,
             "No part of the API: top_k of each chunk of so many elements; of a last one of m "
             "elements ceil(k * m / chunk). How many indices, or -1.");
  module.def("sparse_add", or_raise(sparse_add), x, held, left, simd,
             "No part of the API: left = x + held; whether all of it is finite.");
  module.def("sparse_histogram", or_raise(sparse_histogram), left, py::arg("shift"),
             py::arg("bits"), py::arg("prefix"), py::arg("bins"), simd,
             "No part of the API: of the elements whose magnitude's bits begin with `prefix`, "
             "above the lowest shift + bits, count each by the `bits` that follow, into int64 "
             "`bins`, to which this adds.");
  module.def("sparse_select", or_raise(sparse_select), left, py::arg("key"), py::arg("ties"),
             indices, simd,
             "No part of the API: the ascending indices of all with magnitude bits above `key` and "
             "of the first `ties` that have these; how many.");
  module.def("sparse_take", or_raise(sparse_take), left, indices, values, simd,
             "No part of the API: values = left[indices], rounded to the nearest finite number of "
             "their type; left[indices] -= values.");
  module.def("pack_indices_bound", or_raise(pack_indices_bound), py::arg("count"), py::arg("size"),
             "No part of the API: the bytes that pack_indices needs room for.");
  module.def("pack_indices", or_raise(pack_indices), indices, py::arg("size"), py::arg("out"), simd,
             "No part of the API: pack indices that ascend strictly below `size` into uint8 `out`; "
             "how many bytes. docs/wire.md says which.");
  module.def("unpack_indices", or_raise(unpack_indices), py::arg("payload"), py::arg("size"),
             indices, simd,
             "No part of the API: the inverse, for the exact bytes of a payload of as many indices "
             "as `indices` has elements; ConfigurationError for any others.");
  module.def("sparse_sum", or_raise(sparse_sum), indices, values, py::arg("out_indices"),
             py::arg("out_values"), simd,
             "No part of the API: the sum of one sparse vector a rank in the contract's order, "
             "where what is absent adds nothing; how many places.");
  module.def("sparse_scatter", or_raise(sparse_scatter), indices, values, py::arg("out"),
             py::arg("divisor"), simd,
             "No part of the API: out = 0 but out[indices] = values / divisor, rounded once.");
}

}  // namespace pycollective
