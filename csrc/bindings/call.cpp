#include "bindings/call.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "bindings/errors_py.h"

namespace pycollective {
namespace {

bool given(PyObject* object) { return object != nullptr && object != Py_None; }

}  // namespace

bool read_wire(PyObject* name, Wire& wire) {
  if (PyUnicode_Check(name)) {
    for (const WireTraits& row : kWireTable) {
      if (PyUnicode_CompareWithASCIIString(name, row.name) != 0) continue;
      wire = row.wire;
      return true;
    }
  }
  raise_configuration_error("wire %R is not here; there are %s", name,
                            list_names(kWireTable, "'").c_str());
  return false;
}

bool Call::prepare(OpKind kind, const CallArguments& arguments, int rank, int size) {
  request_.kind = kind;
  request_.root = static_cast<int>(arguments.root);
  if (reduces(kind) && !read_op(arguments.op)) return false;
  if (given(arguments.wire) && !read_wire(arguments.wire, request_.wire)) return false;
  if (given(arguments.counts) && !read_counts(arguments.counts)) return false;
  if (kind == OpKind::kBarrier) return true;
  if (arguments.tag < 0 || arguments.tag > std::numeric_limits<std::int32_t>::max()) {
    raise_configuration_error("%s: tag %ld is not one of 0 to %d", name_of(kind), arguments.tag,
                              std::numeric_limits<std::int32_t>::max());
    return false;
  }
  request_.tag = static_cast<int>(arguments.tag);
  if (arguments.from_any) {
    request_.root = kAnySource;
    request_.source = &source_;  // of run(); a Work has its own
  } else if (arguments.root < 0 || arguments.root >= size) {
    raise_configuration_error("%s: rank %ld is not one of 0 to %d", name_of(kind), arguments.root,
                              size - 1);
    return false;
  }
  source_ = request_.root;
  return open_arrays(arguments) && check_sizes(rank, size);
}

bool Call::prepare_nodes(OpKind kind, const CallArguments& arguments, DealtNodes nodes,
                         PyObject* rows, PyObject* shape, int rank, int size) {
  std::size_t elements = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i)
    elements *= PyLong_AsSize_t(PyTuple_GET_ITEM(shape, i));
  if (PyErr_Occurred()) return false;
  request_.kind = kind;
  request_.root = static_cast<int>(arguments.root);
  if (!read_op(arguments.op)) return false;
  if (given(arguments.wire) && !read_wire(arguments.wire, request_.wire)) return false;
  if (given(arguments.counts) && !read_counts(arguments.counts)) return false;
  request_.dtype = Dtype::kFloat32;
  if (given(arguments.output)) {
    if (!first_.open(arguments.output, "the output array")) return false;
    request_.dtype = first_.dtype();
    if (has(traits_of(kind).output, rank, request_.root)) {
      if (!first_.stage() || !first_.check_writable(arguments.output, name_of(kind))) return false;
      output_ = &first_;
      request_.output = output_->data();
    }
  }
  nodes.dtype = request_.dtype;
  nodes.reduce_op = request_.reduce_op;
  if (!read_rows(std::move(nodes), rows, elements)) return false;
  return check_nodes_sizes(elements, shape, rank, size);
}

// Sets request_.count, and checks the output against it.
bool Call::check_nodes_sizes(std::size_t elements, PyObject* shape, int rank, int size) {
  const auto n = static_cast<std::size_t>(size);
  const std::vector<std::size_t>& counts = request_.counts;
  request_.count = elements;
  if (!in_shards(request_.kind)) {
    if (output_ == nullptr || output_->has_shape(shape)) return true;
    raise_configuration_error("%s: the output must have the shape of the accumulator's leaves, %R",
                              name_of(request_.kind), shape);
    return false;
  }
  if (!counts.empty() && (counts.size() != n || std::accumulate(counts.begin(), counts.end(),
                                                                std::size_t{0}) != elements)) {
    raise_configuration_error("%s: counts must be %d numbers whose sum is %zu",
                              name_of(request_.kind), size, elements);
    return false;
  }
  if (counts.empty() && elements % n != 0) {
    raise_configuration_error("%s: %zu elements are no multiple of %d ranks: give counts=",
                              name_of(request_.kind), elements, size);
    return false;
  }
  request_.count = elements / n;
  const std::size_t mine = counts.empty() ? request_.count : counts[static_cast<std::size_t>(rank)];
  if (output_ == nullptr || output_->count() == mine) return true;
  raise_configuration_error("%s: the output has %zu elements and the result %zu",
                            name_of(request_.kind), output_->count(), mine);
  return false;
}

bool Call::read_rows(DealtNodes nodes, PyObject* rows, std::size_t elements) {
  PyObject* sequence = PySequence_Fast(rows, "rows must be a sequence of arrays");
  if (sequence == nullptr) return false;
  const Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence);
  for (Py_ssize_t i = 0; i < length && PyErr_Occurred() == nullptr; ++i) {
    ArrayView& row = *rows_.emplace_back(std::make_unique<ArrayView>());
    if (!row.open(PySequence_Fast_GET_ITEM(sequence, i), "a row")) break;
    if (row.dtype() != Dtype::kFloat32 || !row.contiguous() || row.count() != elements)
      raise_configuration_error("row %zd is not a flat array of %zu elements of float32", i,
                                elements);
    nodes.rows.push_back(static_cast<float*>(row.data()));
  }
  Py_DECREF(sequence);
  request_.nodes = std::make_shared<const DealtNodes>(std::move(nodes));
  return PyErr_Occurred() == nullptr;
}

void Call::keep_with(KeptArrays& kept) {
  std::vector<PyObject*> objects;
  for (const ArrayView* each : {&first_, &second_}) each->add_owners(objects);
  for (const auto& each : rows_) each->add_owners(objects);
  request_.keep = kept.keep(std::move(objects));
}

bool Call::read_op(PyObject* op) {
  request_.reduce_op = ReduceOp::kSum;
  if (op == nullptr) return true;
  if (PyUnicode_Check(op)) {
    for (const ReduceOpTraits& row : kReduceOpTable) {
      if (PyUnicode_CompareWithASCIIString(op, row.name) != 0) continue;
      request_.reduce_op = row.op;
      return true;
    }
  }
  raise_configuration_error("op %R is not here; there are %s", op,
                            list_names(kReduceOpTable, "'").c_str());
  return false;
}

bool Call::read_counts(PyObject* counts) {
  PyObject* sequence = PySequence_Fast(counts, "counts must be a sequence of numbers");
  if (sequence == nullptr) return false;
  const Py_ssize_t length = PySequence_Fast_GET_SIZE(sequence);
  request_.counts.reserve(static_cast<std::size_t>(length));
  if (length == 0) raise_configuration_error("counts is empty");
  for (Py_ssize_t i = 0; i < length && !PyErr_Occurred(); ++i) {
    PyObject* count = PySequence_Fast_GET_ITEM(sequence, i);
    request_.counts.push_back(PyLong_AsSize_t(count));
    if (!PyErr_Occurred()) continue;
    PyErr_Clear();
    raise_configuration_error("counts: entry %zd is no number of elements: %R", i, count);
  }
  Py_DECREF(sequence);
  return !PyErr_Occurred();
}

bool Call::open_arrays(const CallArguments& arguments) {
  const char* kind = name_of(request_.kind);
  NamedStream stream;
  if (!read_stream(arguments.stream, stream)) return false;
  const auto open = [&](ArrayView& array, PyObject* object, const char* name) {
    return array.open_anywhere(object, name, stream) && array.stage();
  };
  const bool in_place = arguments.output == arguments.input;
  if (given(arguments.input)) {
    if (!open(first_, arguments.input, "the array")) return false;
    input_ = &first_;
  }
  if (given(arguments.output)) {
    if (!in_place && !open(second_, arguments.output, "the output array")) return false;
    output_ = in_place ? &first_ : &second_;
    if (!output_->check_writable(arguments.output, kind)) return false;
  }
  if (input_ == nullptr && output_ == nullptr) {
    raise_configuration_error("%s: no array given", kind);
    return false;
  }
  const ArrayView& either = input_ != nullptr ? *input_ : *output_;
  if (output_ != nullptr && either.dtype() != output_->dtype()) {
    raise_configuration_error("%s: the input is %s and the output %s; they must be the same", kind,
                              name_of(either.dtype()), name_of(output_->dtype()));
    return false;
  }
  request_.dtype = either.dtype();
  request_.input = input_ != nullptr ? input_->data() : nullptr;
  request_.output = output_ != nullptr ? output_->data() : nullptr;
  return locate(either, output_ != nullptr ? *output_ : either);
}

// Where both arrays lie, and the stream. An array without elements lies anywhere.
bool Call::locate(const ArrayView& one, const ArrayView& other) {
  const ArrayView& array = one.device() != Location::kAnyDevice ? one : other;
  if (array.device() != other.device() && other.device() != Location::kAnyDevice) {
    raise_configuration_error(
        "%s: of input and output one lies on GPU %d and the other %s; they "
        "must lie together",
        name_of(request_.kind), std::max(array.device(), other.device()),
        std::min(array.device(), other.device()) < 0 ? "in the host's memory" : "on another");
    return false;
  }
  if (array.device() == Location::kHost) return true;
  if (array.device() == other.device() && array.stream().handle != other.stream().handle) {
    raise_configuration_error(
        "%s: input and output name different streams; say which one to follow: stream=...",
        name_of(request_.kind));
    return false;
  }
  // Of a stream that nobody names, nobody knows what to order after it.
  request_.location = {array.device(), array.stream().handle, !array.stream().given};
  return true;
}

// Sets request_.count, and checks each array against it.
bool Call::check_sizes(int rank, int size) {
  const char* kind = name_of(request_.kind);
  const auto n = static_cast<std::size_t>(size);
  if (!request_.counts.empty() && request_.counts.size() != n) {
    raise_configuration_error("%s: counts has %zu entries for %d ranks", kind,
                              request_.counts.size(), size);
    return false;
  }
  switch (traits_of(request_.kind).pieces) {
    case Pieces::kCut:
      if (input_ != nullptr && output_ != nullptr && !input_->same_shape(*output_)) {
        raise_configuration_error("%s: input and output have different shapes", kind);
        return false;
      }
      request_.count = input_ != nullptr ? input_->count() : output_->count();
      return true;
    case Pieces::kPairs:
      if (input_ == nullptr || output_ == nullptr) {
        raise_configuration_error("%s: both arrays are needed", kind);
        return false;
      }
      if (input_->count() != output_->count() || input_->count() % n != 0) {
        raise_configuration_error(
            "%s: the input has %zu elements and the output %zu; both must have the same, a "
            "multiple of %d",
            kind, input_->count(), output_->count(), size);
        return false;
      }
      request_.count = input_->count() / n;
      return true;
    case Pieces::kRanks:
      break;
  }
  // One array holds all ranks' shards, the other holds one.
  const bool input_is_whole = traits_of(request_.kind).input.holds == Holds::kAllShards;
  const ArrayView* whole = input_is_whole ? input_ : output_;
  const ArrayView* shard = input_is_whole ? output_ : input_;
  if (shard == nullptr) {
    raise_configuration_error("%s: the array for this rank's own shard is missing", kind);
    return false;
  }
  request_.count = shard->count();
  const std::size_t mine =
      request_.counts.empty() ? shard->count() : request_.counts[static_cast<std::size_t>(rank)];
  const std::size_t all =
      request_.counts.empty()
          ? mine * n
          : std::accumulate(request_.counts.begin(), request_.counts.end(), std::size_t{0});
  if (shard->count() != mine || (whole != nullptr && whole->count() != all)) {
    raise_configuration_error(
        "%s: rank %d's shard has %zu elements and the whole %zu; expected %zu and %zu for %d ranks",
        kind, rank, shard->count(), whole != nullptr ? whole->count() : all, mine, all, size);
    return false;
  }
  return true;
}

}  // namespace pycollective
