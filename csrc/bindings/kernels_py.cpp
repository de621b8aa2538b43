// Reductions, one kernel at a time, for leaves and for tests.
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/array_view.h"
#include "bindings/errors_py.h"
#include "bindings/kernel_arguments.h"
#include "kernels/kernels.h"

namespace py = pybind11;

namespace pycollective {
namespace {

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

void combine_into(const std::vector<py::object>& inputs, const std::vector<int>& steps,
                  double divisor, const std::string& op_name, const std::string& dtype_name,
                  const py::object& out, bool finish, const std::string& simd) {
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
  const bool divides = op == ReduceOp::kAvg && finish;
  if (!(divisor > 0 && std::isfinite(divisor))) refuse("the divisor is not above 0");
  if (divides && !wide && leaf->dtype != Dtype::kFloat32 && leaf->dtype != Dtype::kFloat64 &&
      (divisor > kCountableRanks || divisor != std::floor(divisor)))
    refuse("integers are divided by a whole number of leaves");

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
                         static_cast<int>(terms.size()), divisor, narrow};
  const std::size_t size = size_of(to.dtype());
  // A result that stays in the accumulator's type is a node, which that type's own kernel finishes.
  const CombineFn finishing =
      finish && !narrow ? find_kernels(node, op, level_named(simd)).combine : nullptr;
  run([&] {
    auto* const data = to.as<std::byte>();
    combine_exactly(kernels.combine, what, std::move(terms), sizes, data, size, to.count());
    if (finishing == nullptr) return;
    const Combination alone{&kRecipeTake, 1, 1, divisor, true};
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

void sum_squares(const std::vector<py::object>& arrays,
                 const std::vector<std::vector<std::size_t>>& rows, const py::object& out,
                 const std::string& simd) {
  const SimdLevel level = level_named(simd);
  if (arrays.size() != rows.size()) refuse("there must be rows for each array");
  const Argument to(out, "out", true);
  std::size_t sums = 0;
  for (const auto& each : rows) sums += each.size();
  if (to.of(Dtype::kFloat64).count() != sums)
    refuse("there must be " + std::to_string(sums) + " sums, one for each node, not " +
           std::to_string(to.count()));
  struct Node {
    SquaresFn squares;
    const std::byte* data;
    std::size_t rows, length;
  };
  std::vector<Node> nodes;
  std::vector<Argument> opened;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const Argument& each = opened.emplace_back(arrays[i], "an array", false);
    const SquaresFn squares = find_squares(each.value_dtype(), level);
    if (squares == nullptr)
      refuse("an array must be of a float type, not " + std::string(name_of(each.dtype())));
    const std::size_t all = each.view().dimensions() == 0 ? 1 : each.view().extent(0);
    const std::size_t length = all == 0 ? 0 : each.count() / all;
    const auto* data = each.as<std::byte>();
    std::size_t left = all;
    for (const std::size_t some : rows[i]) {
      if (some < 1 || some > left) refuse("an array's nodes must have its rows");
      nodes.push_back({squares, data, some, length});
      data += some * length * size_of(each.dtype());
      left -= some;
    }
    if (left != 0) refuse("an array's nodes must have all its rows");
  }
  run([&] {
    auto* sum = to.as<double>();
    for (const Node& each : nodes) *sum++ = each.squares(each.data, each.rows, each.length);
  });
}

}  // namespace

// For the package itself: none of these is part of the API.
void bind_reductions(py::module_& module) {
  module.def("reduce_into", or_raise(reduce_into), py::arg("inputs"), py::arg("op"), py::arg("out"),
             py::arg("copy") = py::none(), py::arg("simd") = "",
             "One native kernel call, as the engine makes it: reduce the leaves `inputs`, arrays "
             "alike in dtype and count, into `out` (which may be one of them) and `copy`.");
  module.def(
      "combine_into", or_raise(combine_into), py::arg("inputs"), py::arg("recipe"),
      py::arg("divisor"), py::arg("op"), py::arg("dtype"), py::arg("out"), py::arg("finish"),
      py::arg("simd") = "",
      "Combine leaves of `dtype` and nodes of its accumulator's type into `out`, as `recipe` "
      "says (`pycollective.order.recipe`): a node, or with `finish` the result, which `avg` "
      "divides by `divisor`, in either type.");
  module.def("accumulate", or_raise(accumulate), py::arg("leaf"), py::arg("shapes"),
             py::arg("nodes"), py::arg("out"), py::arg("simd") = "",
             "Add a leaf, an array or None (+0) of each shape, one behind the other, and the "
             "`nodes` that it completes, nearest first, into the row `out`, which may be one of "
             "them. A row is a flat array of float32; a node is a row, or a list of arrays that "
             "leaf_is_node.");
  module.def("leaf_is_node", or_raise(leaf_is_node), py::arg("leaf"), py::arg("shapes"),
             "Whether a leaf can be a node as it lies: contiguous arrays of float32.");
  module.def("sum_squares", or_raise(sum_squares), py::arg("arrays"), py::arg("rows"),
             py::arg("out"), py::arg("simd") = "",
             "Sums of squares, in float64: of each array those of its nodes, which have so many "
             "rows of dimension 0, one behind the other (contract.md, Norms). Of int16 an "
             "element is a bfloat16's bits.");
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

}  // namespace pycollective
