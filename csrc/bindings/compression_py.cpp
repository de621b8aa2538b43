// What compression calls: kernels over the segments of a bucket, packed indices, sparse sums.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/errors_py.h"
#include "bindings/kernel_arguments.h"
#include "kernels/quantize/quantize.h"
#include "kernels/segments.h"
#include "kernels/sparse/sparse.h"

namespace py = pybind11;

namespace pycollective {
namespace {

constexpr bool fits(std::size_t at, std::size_t size, std::size_t room) {
  return size <= room && at <= room - size;
}

// A table of segments. Its addresses are trusted; what else a row says is looked at.
class Rows {
 public:
  explicit Rows(const py::object& object) : rows_(object, "table", false) {
    const ArrayView& shape = rows_.of(Dtype::kInt64).view();
    if (shape.dimensions() != 2 || shape.extent(1) != kSegmentColumns)
      refuse("table must have " + std::to_string(kSegmentColumns) + " columns");
    constexpr std::int64_t kMost = std::int64_t{1} << 56;
    check("no segment", [](const TableRow& row) {
      return row.elements >= 0 && row.elements <= kMost && row.dtype >= 0 &&
             row.dtype < std::int64_t{std::size(kSegmentDtypes)} && row.item >= 0 && row.at >= 0 &&
             row.k >= 0 && row.entry >= 0 && (row.elements == 0 || row.address != 0);
    });
  }

  std::size_t count() const { return rows_.view().extent(0); }
  Table table() const { return {rows_.as<const TableRow>(), count()}; }

  template <class Good>
  void check(const char* why, const Good& good) const {
    for (const TableRow& row : table())
      if (!good(row)) refuse("row " + std::to_string(&row - table().first) + " of table is " + why);
  }
  // `found` has a word for each item, from word `first` on.
  void check_items(const Argument& found, std::size_t first) const {
    check("of an item for which found has no word", [&](const TableRow& row) {
      return fits(first, static_cast<std::size_t>(row.item) + 1, found.count());
    });
  }
  template <class Size>
  void check_bytes(std::size_t room, const Size& size) const {
    check("of bytes that messages do not have",
          [&](const TableRow& row) { return fits(row.place(), size(row), room); });
  }
  // Of top-k: places of what is compressed, bytes of what is not.
  void check_places(const Argument& messages) const {
    const std::size_t room = messages.of(Dtype::kUInt8).count();
    check("of bytes that messages do not have", [&](const TableRow& row) {
      return row.k != 0 || fits(row.place(), row.count() * sizeof(float), room);
    });
    check_places();
  }
  void check_places() const {
    check("of 2**32 places or more", [](const TableRow& row) {
      return row.k == 0 || fits(row.place(), row.count(), kPlaces);
    });
  }

 private:
  static constexpr std::size_t kPlaces = (std::size_t{1} << 32) - 1;
  Argument rows_;
};

// What a call finds.
class Found {
 public:
  explicit Found(const py::object& object) : words_(object, "found", true) {
    words_.of(Dtype::kInt32).room_for(kFoundNonzero);
  }
  operator const Argument&() const { return words_; }
  std::int32_t* words() const { return words_.as<std::int32_t>(); }

 private:
  Argument words_;
};

std::size_t checked_zero_at(std::int64_t zero_at) {
  if (zero_at < 0) refuse("zero_at must be 0 or more");
  return static_cast<std::size_t>(zero_at);
}

float checked_divisor(double divisor) {
  const auto narrow = static_cast<float>(divisor);
  if (!(narrow > 0 && std::isfinite(narrow)) || narrow != divisor)
    refuse("divisor must be a finite fp32 above 0");
  return narrow;
}

// Where a gradient's elements lie, which rows of tables may then say.
std::tuple<std::intptr_t, std::size_t, std::ptrdiff_t> flat_floats(const py::object& object,
                                                                   const char* name, bool written) {
  const Argument array(object, name, written);
  const Dtype dtype = array.of_floats().dtype();
  const auto* const number = std::find(std::begin(kSegmentDtypes), std::end(kSegmentDtypes), dtype);
  return {reinterpret_cast<std::intptr_t>(array.as<void>()), array.count(),
          number - std::begin(kSegmentDtypes)};
}

void fill_nan_segments(const py::object& table, const py::object& found) {
  const Rows rows(table);
  const Found finds(found);
  run([&] { fill_nan(rows.table(), finds.words()); });
}

void check_finite_segments(const py::object& table, const py::object& found) {
  const Rows rows(table);
  const Found finds(found);
  run([&] { check_finite(rows.table(), finds.words()); });
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

std::size_t payload_bytes(const std::string& codec, long long chunk, long long count) {
  constexpr long long kMost = 1LL << 56;
  if (count < 0 || count > kMost) refuse("no array has " + std::to_string(count) + " elements");
  return quantized_bytes(codec_named(codec, SimdLevel::kPortable), checked_chunk(chunk),
                         static_cast<std::size_t>(count));
}

// How many bytes of a message a row has.
auto bytes_by(const QuantizeCodec& codec, std::size_t chunk) {
  return [&codec, chunk](const TableRow& row) {
    return row.k == 0 ? row.count() * sizeof(float) : quantized_bytes(codec, chunk, row.count());
  };
}

void quantize(const std::string& codec_name, long long chunk_size, const py::object& table,
              const py::object& messages, const py::object& found, std::int64_t zero_at,
              const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const QuantizeCodec& codec = codec_named(codec_name, level);
  const std::size_t chunk = checked_chunk(chunk_size), zeros = checked_zero_at(zero_at);
  const Rows rows(table);
  const Argument to(messages, "messages", true);
  const Found finds(found);
  rows.check_bytes(to.of(Dtype::kUInt8).count(), bytes_by(codec, chunk));
  rows.check_items(finds, zeros == 0 ? kFoundNonzero : zeros);
  run([&] {
    quantize_segments(codec, chunk, rows.table(), to.as<std::byte>(), finds.words(), zeros, level);
  });
}

void dequantize(const std::string& codec_name, long long chunk_size, const py::object& table,
                const py::object& messages, double divisor, const py::object& found,
                std::int64_t zero_at, const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const QuantizeCodec& codec = codec_named(codec_name, level);
  const std::size_t chunk = checked_chunk(chunk_size), zeros = checked_zero_at(zero_at);
  const Rows rows(table);
  const Argument from(messages, "messages", false);
  const Found finds(found);
  const ArrayView& shape = from.of(Dtype::kUInt8).view();
  if (shape.dimensions() != 2 || shape.extent(0) < 1 || shape.extent(0) > kCountableRanks)
    refuse("messages must be a row for each rank, 1 to " + std::to_string(kCountableRanks) +
           " of them");
  const RankMessages came{from.as<const std::byte>(), shape.extent(0), shape.extent(1)};
  rows.check_bytes(came.bytes, bytes_by(codec, chunk));
  if (zeros != 0) {
    rows.check_items(finds, zeros);
    rows.check("of an item for which messages have no bit", [&](const TableRow& row) {
      return fits(kZeroBitsAt, static_cast<std::size_t>(row.item) / 8 + 1, came.bytes);
    });
  }
  const float by = checked_divisor(divisor);
  run([&] {
    dequantize_segments(codec, chunk, rows.table(), came, by, finds.words(), zeros, level);
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

std::uint64_t size_from(std::int64_t size) {
  if (size < 0 || static_cast<std::uint64_t>(size) > kMostElements)
    refuse("size must be 0 to 2**32, not " + std::to_string(size));
  return static_cast<std::uint64_t>(size);
}

TopKOutput entries_at(const Argument& places, const Argument& values) {
  values.of_values().long_as(places.of_indices());
  return {places.as<std::uint32_t>(), values.as<void>(), values.value_dtype()};
}

void top_k(const py::object& table, std::int64_t chunk_size, const py::object& places,
           const py::object& values, const py::object& messages, const py::object& found,
           const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const std::size_t chunk = chunk_size == 0 ? 0 : checked_chunk(chunk_size);
  const Rows rows(table);
  const Argument at = output(places, "places"), of = output(values, "values");
  const Argument to(messages, "messages", true);
  const Found finds(found);
  const TopKOutput entries = entries_at(at, of);
  rows.check_places(to);
  rows.check_items(finds, kFoundNonzero);
  rows.check("of more than all of a chunk", [&](const TableRow& row) {
    return chunk == 0 || static_cast<std::size_t>(row.k) <= chunk;
  });
  rows.check("of entries that places and values do not have", [&](const TableRow& row) {
    return fits(static_cast<std::size_t>(row.entry), entries_of(row, chunk), at.count());
  });
  run([&] {
    top_k_segments(rows.table(), chunk, entries, to.as<std::byte>(), finds.words(), level);
  });
}

void sparse_add(const py::object& table, const py::object& messages, const py::object& found,
                const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const Rows rows(table);
  const Argument to(messages, "messages", true);
  const Found finds(found);
  rows.check_places(to);
  rows.check_items(finds, kFoundNonzero);
  run([&] { add_segments(rows.table(), to.as<std::byte>(), finds.words(), level); });
}

// One number for each row, each 0 or more.
const std::int64_t* numbers_of(const Argument& numbers, const char* name, const Rows& rows,
                               std::int64_t most) {
  const auto* const first = numbers.of(Dtype::kInt64).as<const std::int64_t>();
  if (numbers.count() != rows.count())
    refuse(std::string(name) + " must have one for each row of table");
  for (std::size_t i = 0; i < numbers.count(); ++i)
    if (first[i] < 0 || first[i] > most)
      refuse(std::string(name) + " must be 0 to " + std::to_string(most));
  return first;
}

void sparse_histogram(const py::object& table, int shift, int bits, const py::object& prefixes,
                      const py::object& bins, const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const Rows rows(table);
  const Argument of(prefixes, "prefixes", false), to(bins, "bins", true);
  if (shift < 0 || bits < 1 || shift > 31 || bits > 31 - shift)
    refuse("shift must be 0 or more, bits 1 or more, and both together at most 31");
  if (to.of(Dtype::kInt32).count() != rows.count() << bits)
    refuse("bins must have 2**bits elements for each row of table");
  const std::int64_t* const each = numbers_of(of, "prefixes", rows, kMostKey);
  rows.check_places();
  run([&] { histogram_segments(rows.table(), shift, bits, each, to.as<std::uint32_t>(), level); });
}

std::size_t sparse_select(const py::object& table, const py::object& keys, const py::object& ties,
                          const py::object& places, const py::object& values,
                          const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const Rows rows(table);
  const Argument key(keys, "keys", false), tie(ties, "ties", false);
  const Argument at = output(places, "places"), of = output(values, "values");
  const TopKOutput entries = entries_at(at, of);
  const std::int64_t* const each_key = numbers_of(key, "keys", rows, kMostKey);
  const std::int64_t* const each_tie = numbers_of(tie, "ties", rows, INT64_MAX);
  rows.check_places();
  std::uint64_t most = 0;
  for (const TableRow& row : rows.table()) most += entries_of(row, 0);
  at.room_for(most);
  return run([&] { return select_segments(rows.table(), each_key, each_tie, entries, level); });
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

void sparse_scatter(const py::object& table, const py::object& places, const py::object& values,
                    double divisor, const py::object& found, const py::object& all_zero,
                    const std::string& simd) {
  const SimdLevel level = level_named(simd);
  const Rows rows(table);
  const Argument at = input(places, "places"), of = input(values, "values");
  const Argument zero(all_zero, "all_zero", false);
  const Found finds(found);
  of.of(Dtype::kFloat32).long_as(at.of_indices());
  zero.of(Dtype::kUInt8);
  rows.check("of an item that all_zero does not have", [&](const TableRow& row) {
    return static_cast<std::size_t>(row.item) < zero.count();
  });
  const float by = checked_divisor(divisor);
  const bool good = run([&] {
    const auto* const first = at.as<const std::uint32_t>();
    if (!find_sparse(level).ascends(first, at.count(), kMostElements)) return false;
    scatter_segments(rows.table(), {first, of.as<const float>(), at.count()}, by, finds.words(),
                     zero.as<const std::uint8_t>(), level);
    return true;
  });
  if (!good) refuse("places must ascend strictly");
}

void bind_segments(py::module_& module) {
  const py::arg codec("codec"), chunk("chunk"), table("table"), messages("messages"),
      found("found"), divisor("divisor"), places("places"), values("values");
  const py::arg_v zero_at(py::arg("zero_at") = 0), simd(py::arg("simd") = "");
  module.def("flat_floats", or_raise(flat_floats), py::arg("array"), py::arg("name"),
             py::arg("written"),
             "The address, the number of elements and the number of the type (of "
             "`pycollective.segments.DTYPES`) of a contiguous array of float32, float16 or "
             "bfloat16; `name` is what errors call it.");
  module.def("quantize", or_raise(quantize), codec, chunk, table, messages, found, zero_at, simd,
             "Quantize the segments of `table` (pycollective/segments.py) to payloads in uint8 "
             "`messages`, and leave the rest in their residuals; those with K = 0 are copied in "
             "fp32. With `zero_at`, items whose word is set from there on are left out; without, "
             "notes which are not all zero.");
  module.def("dequantize", or_raise(dequantize), codec, chunk, table, messages, divisor, found,
             zero_at, simd,
             "Add up the segments' payloads, or fp32 numbers, in the rows of uint8 `messages` in "
             "the contract's order, divide by `divisor` and round once. NaN if what was found is "
             "bad. With `zero_at`, items that are all zero in each row's header become zeros, and "
             "their words from there on 1.");
  module.def("top_k", or_raise(top_k), table, chunk, places, values, messages, found, simd,
             "Take the first K elements of each segment (with `chunk`: of each so many) by "
             "magnitude, of equal ones by place: places ascend, values are rounded to the nearest "
             "finite number, and the residuals keep what is left. Those with K = 0 are copied in "
             "fp32 to uint8 `messages`.");
  module.def("sparse_add", or_raise(sparse_add), table, messages, found, simd,
             "The new residuals: the gradient and the old ones. Those with K = 0 are copied in "
             "fp32 to uint8 `messages`.");
  module.def("sparse_histogram", or_raise(sparse_histogram), table, py::arg("shift"),
             py::arg("bits"), py::arg("prefixes"), py::arg("bins"), simd,
             "Of the elements of each new residual whose magnitude's bits begin with its prefix, "
             "above the lowest shift + bits, count each by the `bits` that follow; adds to int32 "
             "`bins`, a row of 2**bits each.");
  module.def("sparse_select", or_raise(sparse_select), table, py::arg("keys"), py::arg("ties"),
             places, values, simd,
             "Take from each new residual all with magnitude bits above its key and the first "
             "`ties` that have these, K at most; returns how many entries.");
  module.def("sparse_scatter", or_raise(sparse_scatter), table, places, values, divisor, found,
             py::arg("all_zero"), simd,
             "Each segment is 0 but for values / divisor, rounded once, at the `places` that "
             "begin at its own, and for items in uint8 `all_zero` all of it. NaN if what was "
             "found is bad.");
  module.def("fill_nan", or_raise(fill_nan_segments), table, found,
             "Fill the segments with NaN if what was found is bad.");
  module.def("check_finite", or_raise(check_finite_segments), table, found,
             "Note whether an element of the segments is not finite.");
}

}  // namespace

// For the package itself: none of these is part of the API.
void bind_compression(py::module_& module) {
  const py::arg size("size"), indices("indices"), values("values"), out("out");
  const py::arg_v simd(py::arg("simd") = "");
  bind_segments(module);
  module.def("quantize_codecs", codecs, "The names of the codecs that quantize() knows.");
  module.def("quantized_bytes", or_raise(payload_bytes), py::arg("codec"), py::arg("chunk"),
             py::arg("count"),
             "Bytes of the payload of so many elements, with a scale for each `chunk` of them "
             "(docs/inside/wire.md).");
  module.def("pack_indices_bound", or_raise(pack_indices_bound), py::arg("count"), size,
             "The bytes that pack_indices needs room for.");
  module.def("pack_indices", or_raise(pack_indices), indices, size, out, simd,
             "Pack indices that ascend strictly below `size` into uint8 `out` (wire.md); "
             "returns how many bytes.");
  module.def("unpack_indices", or_raise(unpack_indices), py::arg("payload"), size, indices, simd,
             "The inverse, for the exact bytes of a payload of as many indices as `indices` has "
             "elements; ConfigurationError for any others.");
  module.def("sparse_sum", or_raise(sparse_sum), indices, values, py::arg("out_indices"),
             py::arg("out_values"), simd,
             "The sum of one sparse vector a rank in the contract's order, where what is absent "
             "adds nothing; returns how many places.");
}

}  // namespace pycollective
