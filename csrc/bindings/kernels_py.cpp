// The kernels, one call at a time, for compression and for tests.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "kernels/kernels.h"
#include "kernels/quantize/quantize.h"
#include "kernels/sparse/sparse.h"

namespace py = pybind11;

namespace pycollective {
namespace {

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The level in force, or one that tests ask for.
SimdLevel level_named(const std::string& name) {
  if (name.empty()) return active_simd_level();
  for (const SimdLevel level : kSimdLevels)
    if (name == name_of(level) && level <= supported_simd_level()) return level;
  refuse("this CPU has no SIMD level '" + name + "'");
}

// An array of the caller's, contiguous, for as long as this lives.
class Argument {
 public:
  Argument(const py::object& object, const char* name, bool written)
      : name_(name), object_(object) {
    if (!view_->open(object_.ptr(), name)) throw py::error_already_set();
    if (!view_->contiguous()) refuse(name_ + " must be contiguous");
    if (written && !view_->check_writable(object_.ptr(), name)) throw py::error_already_set();
  }

  const ArrayView& view() const { return *view_; }
  Dtype dtype() const { return view_->dtype(); }
  std::size_t count() const { return view_->count(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(view_->data());
  }

  const Argument& of(Dtype dtype, const char* called = nullptr) const {
    if (this->dtype() != dtype)
      refuse(name_ + " must be of " + (called != nullptr ? called : name_of(dtype)) + ", not " +
             name_of(this->dtype()));
    return *this;
  }
  const Argument& of_indices() const { return of(Dtype::kInt32, "uint32 (or int32, as its bits)"); }
  const Argument& of_floats() const {
    if (dtype() == Dtype::kFloat32 || dtype() == Dtype::kFloat16 || dtype() == Dtype::kBFloat16)
      return *this;
    refuse(name_ + " must be of float32, float16 or bfloat16, not " + name_of(dtype()));
  }
  // Values that travel: NumPy alone has no bfloat16, so an int16 is one's bits.
  Dtype value_dtype() const { return dtype() == Dtype::kInt16 ? Dtype::kBFloat16 : dtype(); }
  const Argument& of_values() const { return dtype() == Dtype::kInt16 ? *this : of_floats(); }
  const Argument& long_as(const Argument& other) const {
    if (count() != other.count())
      refuse(name_ + " must have as many elements as " + other.name_ + ": " +
             std::to_string(other.count()) + ", not " + std::to_string(count()));
    return *this;
  }
  const Argument& room_for(std::uint64_t needed) const {
    if (count() < needed)
      refuse(name_ + " must have room for " + std::to_string(needed) + ", not " +
             std::to_string(count()));
    return *this;
  }
  const Argument& apart_from(const Argument& other) const {
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

// --- Reductions.

constexpr std::size_t kLeastStreamed = std::size_t{4} << 20;  // bytes of a row

ReduceOp op_named(const std::string& name) {
  if (const ReduceOpTraits* found = find_named(kReduceOpTable, name)) return found->op;
  refuse("no reduce op '" + name + "'");
}

void reduce_into(const std::vector<py::object>& inputs, const std::string& op,
                 const py::object& out, const py::object& copy, const std::string& simd) {
  if (inputs.empty()) refuse("there must be at least one input");
  std::vector<Argument> arguments;
  std::vector<const void*> leaves;
  for (const py::object& input : inputs)
    leaves.push_back(arguments.emplace_back(input, "an input", false).as<void>());
  const Argument to(out, "out", true);
  std::optional<Argument> again;
  if (!copy.is_none()) again.emplace(copy, "copy", true);
  const Argument& first = arguments[0];
  for (const Argument& each : arguments) each.of(first.dtype()).long_as(first);
  to.of(first.dtype()).long_as(first);
  if (again) again->of(first.dtype()).long_as(first);
  const ReduceFn reduce = find_kernels(first.dtype(), op_named(op), level_named(simd)).reduce;
  if (reduce == nullptr) refuse(op + " has no meaning for " + name_of(first.dtype()));
  run([&] {
    reduce(leaves.data(), static_cast<int>(leaves.size()), double(leaves.size()), to.as<void>(),
           again ? again->as<void>() : nullptr, first.count());
  });
}

// Combines terms that need have no room behind their last element: what is behind the last whole
// kNodeRoom goes through buffers that have it.
void combine_exactly(CombineFn combine, const Combination& what, std::vector<Term> terms,
                     const std::vector<std::size_t>& sizes, std::byte* out, std::size_t out_size,
                     std::size_t count) {
  const std::size_t whole = count / kNodeRoom * kNodeRoom, rest = count - whole;
  combine(what, terms.data(), out, nullptr, whole);
  if (rest == 0) return;
  constexpr std::size_t kLargest = 8;  // bytes of an element
  std::vector<std::byte> rooms((terms.size() + 1) * kNodeRoom * kLargest);
  std::byte* room = rooms.data();
  for (std::size_t i = 0; i < terms.size(); ++i, room += kNodeRoom * kLargest) {
    std::memcpy(room, static_cast<const std::byte*>(terms[i].data) + whole * sizes[i],
                rest * sizes[i]);
    terms[i].data = room;
  }
  combine(what, terms.data(), room, nullptr, rest);
  std::memcpy(out + whole * out_size, room, rest * out_size);
}

void combine_into(const std::vector<py::object>& inputs, const std::vector<int>& steps, int leaves,
                  const std::string& op_name, const std::string& dtype_name, const py::object& out,
                  bool finish, const std::string& simd) {
  const DtypeTraits* const leaf = find_named(kDtypeTable, dtype_name);
  if (leaf == nullptr) refuse("no dtype '" + dtype_name + "'");
  const ReduceOp op = op_named(op_name);
  const Kernels kernels = find_kernels(leaf->dtype, op, level_named(simd));
  if (kernels.combine == nullptr) refuse(op_name + " has no meaning for " + dtype_name);
  const bool wide = node_size(leaf->dtype, op) != leaf->size;
  const Dtype node = wide ? Dtype::kFloat32 : leaf->dtype;

  std::vector<std::uint8_t> recipe;
  std::size_t taken = 0, pending = 0;
  for (const int step : steps) {
    recipe.push_back(static_cast<std::uint8_t>(step));
    if (step == kRecipeTake) {
      ++taken;
      ++pending;
    } else if (step != kRecipeCombine || pending-- < 2) {
      refuse("not a recipe");
    }
    if (pending > kMostPending) refuse("a recipe that keeps too many operands waiting");
  }
  if (pending != 1 || taken != inputs.size()) refuse("the recipe must take each input once");
  if (leaves < 1 || leaves > kCountableRanks) refuse("leaves must be 1 or more");

  std::vector<Argument> arguments;
  std::vector<Term> terms;
  std::vector<std::size_t> sizes;
  const Argument to(out, "out", true);
  for (const py::object& input : inputs) {
    const Argument& each = arguments.emplace_back(input, "an input", false);
    const bool is_node = wide && each.dtype() == node;
    each.of(is_node ? node : leaf->dtype).long_as(to);
    if (each.as<void>() != to.as<void>() || each.dtype() != to.dtype()) each.apart_from(to);
    terms.push_back({each.as<void>(), is_node});
    sizes.push_back(size_of(each.dtype()));
  }
  const bool narrow = finish && (!wide || to.dtype() == leaf->dtype);
  to.of(narrow ? leaf->dtype : node);
  const Combination what{recipe.data(), static_cast<int>(recipe.size()),
                         static_cast<int>(terms.size()), double(leaves), narrow};
  const std::size_t size = size_of(to.dtype());
  // A result that stays in the accumulator's type is a node, which that type's own kernel finishes.
  const CombineFn finishing =
      finish && !narrow ? find_kernels(node, op, level_named(simd)).combine : nullptr;
  run([&] {
    auto* const data = to.as<std::byte>();
    combine_exactly(kernels.combine, what, std::move(terms), sizes, data, size, to.count());
    if (finishing == nullptr) return;
    const Combination alone{&kRecipeTake, 1, 1, double(leaves), true};
    combine_exactly(finishing, alone, {{data, true}}, {size}, data, size, to.count());
  });
}

// One of the arrays of an accumulator's leaf; what is strided is copied.
class LeafPart {
 public:
  LeafPart(const py::object& object, const std::vector<std::size_t>& shape,
           const std::string& name) {
    for (const std::size_t extent : shape) count_ *= extent;
    if (object.is_none()) return;
    if (!view_->open(object.ptr(), name.c_str())) throw py::error_already_set();
    std::vector<std::size_t> given;
    for (int i = 0; i < view_->dimensions(); ++i) given.push_back(view_->extent(i));
    if (given != shape)
      refuse(name + " must have shape " + text_of(shape) + ", not " + text_of(given));
    if (find_accumulate(view_->dtype(), SimdLevel::kPortable) == nullptr)
      refuse(name + " must be of a float type up to float32, not " + name_of(view_->dtype()));
    given_ = true;
    is_node_ = view_->dtype() == Dtype::kFloat32 && view_->contiguous();
    if (!view_->stage()) throw py::error_already_set();
  }

  std::size_t count() const { return count_; }
  bool is_node() const { return is_node_; }
  const float* node() const { return static_cast<const float*>(view_->data()); }

  void add_to(std::vector<const float*> nodes, float* out, SimdLevel level, bool streaming) const {
    const auto n = static_cast<int>(nodes.size());
    if (given_) {
      const AccumulateFn accumulate = find_accumulate(view_->dtype(), level);
      return accumulate(view_->data(), nodes.data(), n, out, count_, streaming);
    }
    // A parameter that the leaf does not use is +0 there.
    static constexpr float kZeros[1024] = {};
    const AccumulateFn accumulate = find_accumulate(Dtype::kFloat32, level);
    for (std::size_t left = count_; left != 0;) {
      const std::size_t some = std::min(left, std::size(kZeros));
      accumulate(kZeros, nodes.data(), n, out, some, streaming);
      for (const float*& each : nodes) each += some;
      out += some;
      left -= some;
    }
  }

 private:
  static std::string text_of(const std::vector<std::size_t>& shape) {
    std::string text;
    for (const std::size_t extent : shape)
      text += (text.empty() ? "" : ", ") + std::to_string(extent);
    return "(" + text + (shape.size() == 1 ? ",)" : ")");
  }

  std::size_t count_ = 1;
  bool given_ = false;
  bool is_node_ = false;
  std::unique_ptr<ArrayView> view_ = std::make_unique<ArrayView>();
};

using Shapes = std::vector<std::vector<std::size_t>>;

std::vector<LeafPart> open_leaf(const std::vector<py::object>& arrays, const Shapes& shapes) {
  if (arrays.size() != shapes.size())
    refuse("a leaf must have " + std::to_string(shapes.size()) + " arrays here, not " +
           std::to_string(arrays.size()));
  std::vector<LeafPart> parts;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const std::string which = arrays.size() == 1 ? "" : "array " + std::to_string(i) + " of ";
    parts.emplace_back(arrays[i], shapes[i], which + "the gradient");
  }
  return parts;
}

bool is_node(const std::vector<LeafPart>& leaf) {
  return std::all_of(leaf.begin(), leaf.end(), [](const LeafPart& part) { return part.is_node(); });
}

bool leaf_is_node(const std::vector<py::object>& leaf, const Shapes& shapes) {
  return is_node(open_leaf(leaf, shapes));
}

void accumulate(const std::vector<py::object>& arrays, const Shapes& shapes,
                const std::vector<py::object>& nodes, const py::object& out,
                const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const std::vector<LeafPart> leaf = open_leaf(arrays, shapes);
  const Argument to(out, "out", true);
  std::size_t count = 0;
  for (const LeafPart& part : leaf) count += part.count();
  if (count != to.of(Dtype::kFloat32).count())
    refuse("out must have as many elements as all arrays together");

  std::vector<Argument> rows;
  std::vector<std::vector<LeafPart>> kept;
  // terms[part][node], and where the result of a part goes.
  std::vector<std::vector<const float*>> terms(leaf.size());
  std::vector<float*> into(leaf.size());
  const auto cut = [&](auto* row, const auto& put) {
    for (std::size_t i = 0; i < leaf.size(); row += leaf[i++].count()) put(i, row);
  };
  bool in_place = false;
  for (const py::object& node : nodes) {
    if (py::isinstance<py::list>(node)) {
      kept.push_back(open_leaf(node.cast<std::vector<py::object>>(), shapes));
      if (!is_node(kept.back())) refuse("a leaf that is kept must be contiguous and of float32");
      for (std::size_t i = 0; i < leaf.size(); ++i) terms[i].push_back(kept.back()[i].node());
    } else {
      rows.emplace_back(node, "a node", false).of(Dtype::kFloat32).long_as(to);
      const auto* const row = rows.back().as<float>();
      cut(row, [&](std::size_t i, const float* from) { terms[i].push_back(from); });
      in_place |= row == to.as<float>();
    }
  }
  cut(to.as<float>(), [&](std::size_t i, float* place) { into[i] = place; });
  const bool streaming = !in_place && count * sizeof(float) >= kLeastStreamed;
  run([&] {
    for (std::size_t i = 0; i < leaf.size(); ++i)
      leaf[i].add_to(terms[i], into[i], level, streaming);
  });
}

// --- Quantization.

const QuantizeCodec& codec_named(const std::string& name, SimdLevel level) {
  const QuantizeCodecs codecs = quantize_codecs(level);
  std::string names;
  for (const QuantizeCodec& each : codecs) {
    if (name == each.name) return each;
    names += &each == codecs.begin() ? "" : &each + 1 == codecs.end() ? " and " : ", ";
    names += each.name;
  }
  refuse("no codec '" + name + "'; there are " + names);
}

std::vector<std::string> codecs() {
  std::vector<std::string> names;
  for (const QuantizeCodec& each : quantize_codecs(SimdLevel::kPortable))
    names.emplace_back(each.name);
  return names;
}

std::size_t checked_chunk(long long chunk) {
  if (chunk < 0 || !is_chunk(static_cast<std::size_t>(chunk)))
    refuse("a chunk is a multiple of " + std::to_string(kLeastChunk) + " elements up to " +
           std::to_string(kMostChunk) + ", not " + std::to_string(chunk));
  return static_cast<std::size_t>(chunk);
}

Quantizing quantizing_of(const QuantizeCodec& codec, Dtype dtype) {
  const Quantizing found = codec.find(dtype);
  if (found.quantize == nullptr)
    refuse(std::string("there is no quantization of ") + name_of(dtype));
  return found;
}

std::size_t payload_bytes(const std::string& codec, long long chunk, long long count) {
  constexpr long long kMost = 1LL << 56;
  if (count < 0 || count > kMost) refuse("no array has " + std::to_string(count) + " elements");
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
  errors.of(Dtype::kFloat32).long_as(from).apart_from(from).apart_from(to);
  to.of(Dtype::kUInt8).room_for(quantized_bytes(codec, chunk, from.count())).apart_from(from);
  std::optional<Argument> before;
  if (!held.is_none()) {
    before.emplace(held, "held", false);
    before->of(Dtype::kFloat32).long_as(from);
    errors.apart_from(*before);
    to.apart_from(*before);
  }
  return run([&] {
    return quantizing.quantize(from.as<void>(), before ? before->as<float>() : nullptr,
                               errors.as<float>(), from.count(), chunk, to.as<std::byte>());
  });
}

void dequantize(const std::string& codec_name, long long chunk_size, const py::object& messages,
                long long at, const py::object& out, double divisor, const std::string& simd) {
  const QuantizeCodec& codec = codec_named(codec_name, level_named(simd));
  const std::size_t chunk = checked_chunk(chunk_size);
  const Argument from(messages, "messages", false), to(out, "out", true);
  from.of(Dtype::kUInt8);
  const Quantizing quantizing = quantizing_of(codec, to.dtype());
  const ArrayView& shape = from.view();
  if (shape.dimensions() != 2 || shape.extent(0) < 1 || shape.extent(0) > kCountableRanks)
    refuse("messages must be a row for each rank, 1 to " + std::to_string(kCountableRanks) +
           " of them");
  const std::size_t rows = shape.extent(0), stride = shape.extent(1);
  const std::size_t needed = quantized_bytes(codec, chunk, to.count());
  if (at < 0 || static_cast<std::size_t>(at) > stride ||
      stride - static_cast<std::size_t>(at) < needed)
    refuse("messages of " + std::to_string(stride) + " bytes do not hold " +
           std::to_string(needed) + " from byte " + std::to_string(at) + " on");
  const auto divide = static_cast<float>(divisor);
  if (!(divide > 0 && std::isfinite(divide))) refuse("divisor must be a finite fp32 above 0");
  to.apart_from(from);
  run([&] {
    quantizing.dequantize(from.as<std::byte>() + at, rows, stride, chunk, to.as<void>(), to.count(),
                          divide);
  });
}

// --- Selection and sparse sums.

constexpr std::uint64_t kMostElements = std::uint64_t{1} << 32;
constexpr std::int64_t kMostKey = 0x7FFFFFFF;

// Kernels of sparse vectors take fewer elements, and indices of uint32. The table of element types,
// which is the contract's, has no uint32: as int32, the same bits.
Argument sparse_argument(const py::object& object, const char* name, bool written) {
  const bool unsigned_words = py::isinstance<py::array_t<std::uint32_t>>(object);
  Argument argument(unsigned_words ? py::object(object.attr("view")("int32")) : object, name,
                    written);
  if (argument.count() >= kMostElements)
    refuse(std::string(name) + " must have fewer than 2**32 elements");
  return argument;
}
Argument input(const py::object& object, const char* name) {
  return sparse_argument(object, name, false);
}
Argument output(const py::object& object, const char* name) {
  return sparse_argument(object, name, true);
}

// x, held and left, checked.
class Opened {
 public:
  Opened(const py::object& x, const py::object& held, const py::object& left)
      : x_(input(x, "x")), left_(output(left, "left")) {
    x_.of_floats();
    left_.of(Dtype::kFloat32).long_as(x_);
    if (left_.as<void>() != x_.as<void>()) left_.apart_from(x_);
    if (held.is_none()) return;
    held_ = input(held, "held");
    held_->of(Dtype::kFloat32).long_as(x_);
    left_.apart_from(*held_);
  }
  std::size_t count() const { return x_.count(); }
  void apart_from(const Argument& indices) const {
    indices.apart_from(x_).apart_from(left_);
    if (held_) indices.apart_from(*held_);
  }
  Gradient gradient() const {
    return {x_.dtype(), x_.as<void>(), held_ ? held_->as<float>() : nullptr, left_.as<float>(),
            count()};
  }

 private:
  Argument x_, left_;
  std::optional<Argument> held_;
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
  const Argument out = output(indices, "indices");
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
  const Argument out = output(indices, "indices");
  out.of_indices().room_for(selected_by_chunk(opened.count(), each, elements));
  opened.apart_from(out);
  return run([&] {
    return sparse.top_k_chunks(opened.gradient(), each, elements, out.as<std::uint32_t>());
  });
}

void sparse_histogram(const py::object& left, int shift, int bits, std::int64_t prefix,
                      const py::object& bins, const std::string& simd) {
  const Sparse sparse = find_sparse(level_named(simd));
  const Argument from = input(left, "left"), to = output(bins, "bins");
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
  const Argument from = input(left, "left"), to = output(indices, "indices");
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
  const Argument from = output(left, "left"), at = input(indices, "indices"),
                 to = output(values, "values");
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
  const Argument from = input(indices, "indices"), to = output(out, "out");
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
  const Argument from = input(payload, "payload"), to = output(indices, "indices");
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
  const Argument to = output(out_indices, "out_indices"), sums = output(out_values, "out_values");
  to.of_indices();
  sums.of(Dtype::kFloat32).apart_from(to);
  std::vector<Argument> arrays;
  std::vector<SparseVector> vectors;
  arrays.reserve(2 * indices.size());
  std::uint64_t total = 0;
  for (std::size_t r = 0; r < indices.size(); ++r) {
    const Argument& at = arrays.emplace_back(input(indices[r], "a rank's indices"));
    const Argument& of = arrays.emplace_back(input(values[r], "a rank's values"));
    at.of_indices();
    of.of_values().of(arrays[1].dtype()).long_as(at);
    for (const Argument* out : {&to, &sums}) {
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
  const Argument at = input(indices, "indices"), of = input(values, "values"),
                 to = output(out, "out");
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

void bind_reductions(py::module_& module) {
  module.def("reduce_into", or_raise(reduce_into), py::arg("inputs"), py::arg("op"), py::arg("out"),
             py::arg("copy") = py::none(), py::arg("simd") = "",
             "One native kernel call, as the engine makes it: reduce the leaves `inputs`, arrays "
             "alike in dtype and count, into `out` (which may be one of them) and `copy`.");
  module.def(
      "combine_into", or_raise(combine_into), py::arg("inputs"), py::arg("recipe"),
      py::arg("leaves"), py::arg("op"), py::arg("dtype"), py::arg("out"), py::arg("finish"),
      py::arg("simd") = "",
      "Combine leaves of `dtype` and nodes of its accumulator's type into `out`, as `recipe` "
      "says (`pycollective.order.recipe`): a node, or with `finish` the result over `leaves` "
      "leaves, in either type.");
  module.def("accumulate", or_raise(accumulate), py::arg("leaf"), py::arg("shapes"),
             py::arg("nodes"), py::arg("out"), py::arg("simd") = "",
             "Add a leaf, an array or None (+0) of each shape, one behind the other, and the "
             "`nodes` that it completes, nearest first, into the row `out`, which may be one of "
             "them. A row is a flat array of float32; a node is a row, or a list of arrays that "
             "leaf_is_node.");
  module.def("leaf_is_node", or_raise(leaf_is_node), py::arg("leaf"), py::arg("shapes"),
             "Whether a leaf can be a node as it lies: contiguous arrays of float32.");
  module.def(
      "simd_levels",
      [] {
        std::vector<std::string> names;
        for (const SimdLevel level : kSimdLevels)
          if (level <= supported_simd_level()) names.emplace_back(name_of(level));
        return names;
      },
      "The levels that this CPU can run, the best last.");
  module.def(
      "simd_level", [] { return std::string(name_of(active_simd_level())); },
      "The level in force: PYCOLLECTIVE_SIMD, or the best.");
}

void bind_quantization(py::module_& module) {
  const py::arg codec("codec"), chunk("chunk");
  const py::arg_v simd(py::arg("simd") = "");
  module.def("quantize_codecs", codecs, "The names of the codecs that quantize() knows.");
  module.def("quantized_bytes", or_raise(payload_bytes), codec, chunk, py::arg("count"),
             "Bytes of the payload of so many elements, with a scale for each `chunk` of them "
             "(docs/wire.md).");
  module.def("quantize", or_raise(quantize), codec, chunk, py::arg("x"), py::arg("held"),
             py::arg("left"), py::arg("payload"), simd,
             "Quantize x + held, alike in count (x of float16, bfloat16 or float32, held of "
             "float32 or None), into `payload`, of uint8 with room for quantized_bytes(), and "
             "what that leaves into `left`, of float32. False where a number is not finite; both "
             "then hold anything.");
  module.def("dequantize", or_raise(dequantize), codec, chunk, py::arg("messages"), py::arg("at"),
             py::arg("out"), py::arg("divisor"), simd,
             "Add up payloads in the contract's order, each from byte `at` on in a row of "
             "`messages`, divide by `divisor` and round once into `out`, of float16, bfloat16 or "
             "float32.");
}

void bind_sparse(py::module_& module) {
  const py::arg x("x"), held("held"), left("left"), k("k"), indices("indices"), values("values"),
      size("size"), out("out");
  const py::arg_v simd(py::arg("simd") = "");
  module.def("top_k", or_raise(top_k), x, held, left, k, indices, simd,
             "left = x + held (None: nothing is held), in float32, and the k elements of the "
             "largest magnitude, of equal ones the first, as ascending uint32 indices. Returns k, "
             "or -1 where an element of x + held is not finite (both then hold anything).");
  module.def("top_k_chunks", or_raise(top_k_chunks), x, held, left, k, py::arg("chunk"), indices,
             simd,
             "top_k of each chunk of so many elements; of a last one of m elements "
             "ceil(k * m / chunk). Returns how many indices, or -1.");
  module.def("sparse_add", or_raise(sparse_add), x, held, left, simd,
             "left = x + held; returns whether all of it is finite.");
  module.def("sparse_histogram", or_raise(sparse_histogram), left, py::arg("shift"),
             py::arg("bits"), py::arg("prefix"), py::arg("bins"), simd,
             "Of the elements whose magnitude's bits begin with `prefix`, above the lowest "
             "shift + bits, count each by the `bits` that follow; adds to int64 `bins`.");
  module.def("sparse_select", or_raise(sparse_select), left, py::arg("key"), py::arg("ties"),
             indices, simd,
             "The ascending indices of all with magnitude bits above `key` and of the first `ties` "
             "that have these; returns how many.");
  module.def("sparse_take", or_raise(sparse_take), left, indices, values, simd,
             "values = left[indices], rounded to the nearest finite number of their type; "
             "left[indices] -= values.");
  module.def("pack_indices_bound", or_raise(pack_indices_bound), py::arg("count"), size,
             "The bytes that pack_indices needs room for.");
  module.def("pack_indices", or_raise(pack_indices), indices, size, out, simd,
             "Pack indices that ascend strictly below `size` into uint8 `out` (docs/wire.md); "
             "returns how many bytes.");
  module.def("unpack_indices", or_raise(unpack_indices), py::arg("payload"), size, indices, simd,
             "The inverse, for the exact bytes of a payload of as many indices as `indices` has "
             "elements; ConfigurationError for any others.");
  module.def("sparse_sum", or_raise(sparse_sum), indices, values, py::arg("out_indices"),
             py::arg("out_values"), simd,
             "The sum of one sparse vector a rank in the contract's order, where what is absent "
             "adds nothing; returns how many places.");
  module.def("sparse_scatter", or_raise(sparse_scatter), indices, values, out, py::arg("divisor"),
             simd, "out = 0 but out[indices] = values / divisor, rounded once.");
}

}  // namespace

// For the package itself: none of these is part of the API.
void bind_kernels(py::module_& module) {
  bind_reductions(module);
  bind_quantization(module);
  bind_sparse(module);
}

}  // namespace pycollective
