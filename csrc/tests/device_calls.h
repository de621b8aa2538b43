// A collective call of all ranks: what each has, and what must come of it, by the CPU's kernels in
// the order of the ranks.
#pragma once

#include <numeric>
#include <string>

#include "engine/shards.h"
#include "kernels/kernels.h"
#include "tests/cuda_ranks.h"
#include "tests/device_programs.h"

namespace pycollective::testing {

struct Call {
  Programs programs;
  Dtype dtype = Dtype::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  std::size_t count = 0;
  std::vector<std::size_t> counts;
  bool in_place = false;  // as the contract allows it for the kind: the same, or the own shard
  std::size_t input_offset = 0, output_offset = 0;  // bytes off an aligned address

  const Program& program() const { return *programs[0]; }
  OpKind kind() const { return program().kind; }
  int ranks() const { return program().ranks; }
  std::size_t element() const { return size_of(dtype); }

  // Elements of rank r's shard, and of all before it.
  std::size_t shard(int r) const {
    return counts.empty() ? count : counts[static_cast<std::size_t>(r)];
  }
  std::size_t before(int r) const {
    std::size_t sum = 0;
    for (int other = 0; other < r; ++other) sum += shard(other);
    return sum;
  }
  std::size_t held(const Buffer& buffer, int r) const {
    if (!has(buffer, r, program().root)) return 0;
    if (!in_shards(kind())) return count;
    return buffer.holds == Holds::kShard ? shard(r) : before(ranks());
  }
  std::size_t input(int r) const { return held(traits_of(kind()).input, r); }
  std::size_t output(int r) const { return held(traits_of(kind()).output, r); }
};

// A rank's memory in a call: input and output, with room before, between and behind them.
struct Laid {
  std::size_t input, output;  // bytes from its begin
  std::size_t bytes;
};

constexpr std::size_t kGap = 64;

inline Laid lay_out(const Call& call, int r) {
  const auto room = [](std::size_t bytes) { return (bytes + 63) / 64 * 64 + 2 * kGap; };
  const std::size_t in = call.input(r) * call.element(), out = call.output(r) * call.element();
  Laid laid{kGap + call.input_offset, room(in) + kGap + call.output_offset, room(in) + room(out)};
  const OperationTraits& traits = traits_of(call.kind());
  if (!call.in_place || in == 0 || out == 0) return laid;
  const std::size_t own = call.before(r) * call.element();
  laid.output = laid.input;
  if (traits.input.holds == Holds::kShard) {  // in the output
    laid.output = room(in) + kGap + call.output_offset;
    laid.input = laid.output + own;
  } else if (traits.output.holds == Holds::kShard) {
    laid.output = laid.input + own;
  }
  return laid;
}

inline Data some_numbers(const DtypeTraits& dtype, std::size_t count, Random& random) {
  Data data(count * dtype.size);
  for (std::size_t i = 0; i < count; ++i)
    write_element(dtype, data.data() + i * dtype.size, random);
  return data;
}

// Elements [from, from + count) of each rank's input, combined.
inline Data combined(const Call& call, const std::vector<Data>& inputs, std::size_t from,
                     std::size_t count) {
  Data result(count * call.element());
  std::vector<const void*> leaves;
  for (const Data& input : inputs) leaves.push_back(input.data() + from * call.element());
  const FloatEnvironment ieee;
  find_kernels(call.dtype, call.op, active_simd_level())
      .reduce(leaves.data(), call.ranks(), call.ranks(), result.data(), nullptr, count);
  return result;
}

// By rank; empty where one has no output.
inline std::vector<Data> expected(const Call& call, const std::vector<Data>& inputs) {
  const int n = call.ranks();
  const std::size_t element = call.element();
  const int root = call.program().root;
  const auto slice = [&](int r, std::size_t from, std::size_t count) {
    const Data& all = inputs[static_cast<std::size_t>(r)];
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(from * element);
    return Data(begin, begin + static_cast<std::ptrdiff_t>(count * element));
  };
  const auto all_inputs = [&] {
    Data all;
    for (const Data& input : inputs) all.insert(all.end(), input.begin(), input.end());
    return all;
  };
  std::vector<Data> outputs;
  for (int r = 0; r < n; ++r) {
    Data out;
    if (call.output(r) != 0) {
      switch (call.kind()) {
        case OpKind::kAllReduce:
        case OpKind::kReduce:
          out = r == 0 || call.kind() == OpKind::kReduce ? combined(call, inputs, 0, call.count)
                                                         : outputs[0];
          break;
        case OpKind::kReduceScatter:
          out = combined(call, inputs, call.before(r), call.shard(r));
          break;
        case OpKind::kAllGather:
        case OpKind::kGather:
          out = all_inputs();
          break;
        case OpKind::kBroadcast:
          out = inputs[static_cast<std::size_t>(root)];
          break;
        case OpKind::kScatter:
          out = slice(root, call.before(r), call.shard(r));
          break;
        default:  // all-to-all
          for (int from = 0; from < n; ++from) {
            const Data piece = slice(from, call.before(r), call.shard(r));
            out.insert(out.end(), piece.begin(), piece.end());
          }
      }
    }
    outputs.push_back(out);
  }
  return outputs;
}

// A call in the ranks' memory from byte `at` on: written, launched, and compared.
class Placed {
 public:
  Placed(Call call, std::size_t at, Random& random) : call_(std::move(call)), at_(at) {
    draw(random);
  }
  const Call& call() const { return call_; }
  // Other numbers in the same places.
  void draw(Random& random) {
    inputs_.clear();
    before_.clear();
    after_.clear();
    const DtypeTraits& dtype = traits_of(call_.dtype);
    for (int r = 0; r < call_.ranks(); ++r)
      inputs_.push_back(some_numbers(dtype, call_.input(r), random));
    const std::vector<Data> outputs = expected(call_, inputs_);
    for (int r = 0; r < call_.ranks(); ++r) {
      const auto number = static_cast<std::size_t>(r);
      const Laid laid = lay_out(call_, r);
      Data bytes(laid.bytes, std::byte{0xA5});
      std::copy(inputs_[number].begin(), inputs_[number].end(),
                bytes.begin() + static_cast<std::ptrdiff_t>(laid.input));
      before_.push_back(bytes);
      std::copy(outputs[number].begin(), outputs[number].end(),
                bytes.begin() + static_cast<std::ptrdiff_t>(laid.output));
      after_.push_back(bytes);
    }
  }
  std::size_t bytes() const {
    std::size_t most = 0;
    for (const Data& each : before_) most = std::max(most, each.size());
    return (most + 255) / 256 * 256;
  }
  Request request(const Rank& rank, int r) const {
    const Laid laid = lay_out(call_, r);
    Request request;
    request.kind = call_.kind();
    request.dtype = call_.dtype;
    request.reduce_op = call_.op;
    request.root = call_.program().root;
    request.count = call_.count;
    request.counts = call_.counts;
    request.program = call_.programs[static_cast<std::size_t>(r)];
    const auto pointer = [&](std::size_t offset, std::size_t count) {
      // An empty buffer's address may be anything.
      return reinterpret_cast<void*>(count != 0 ? rank.memory + at_ + offset : 0xDEAD0);
    };
    request.input = pointer(laid.input, call_.input(r));
    request.output = pointer(laid.output, call_.output(r));
    return request;
  }
  void write(DeviceRanks& ranks) const {
    for (int r = 0; r < ranks.size(); ++r)
      ranks.at(r).write(at_, before_[static_cast<std::size_t>(r)]);
  }
  void launch(Rank& rank, int r, std::uint64_t deadline = DeviceRanks::kDeadline) const {
    const Request made = request(rank, r);
    rank.peers->launch(Task(made), rank.stream, deadline);
  }
  void launch(DeviceRanks& ranks) const {
    for (int r = 0; r < ranks.size(); ++r) launch(ranks.at(r), r);
  }
  // A rank's memory is as it was before the call.
  void check_untouched(DeviceRanks& ranks, int r) const {
    const Data& before = before_[static_cast<std::size_t>(r)];
    CHECK(ranks.at(r).read(at_, before.size()) == before);
  }
  void check(DeviceRanks& ranks) const {
    for (int r = 0; r < ranks.size(); ++r) {
      const Data& wanted = after_[static_cast<std::size_t>(r)];
      const Data got = ranks.at(r).read(at_, wanted.size());
      if (got == wanted) continue;
      std::size_t i = 0;
      while (got[i] == wanted[i]) ++i;
      const Laid laid = lay_out(call_, r);
      std::fprintf(stderr,
                   "%s by %s, %s %s: rank %d of %d, %zu elements, in place %d, offsets %zu %zu: "
                   "byte %zu is wrong (input at %zu, output at %zu)\n",
                   name_of(call_.kind()), call_.program().algorithm.c_str(), name_of(call_.dtype),
                   name_of(call_.op), r, call_.ranks(), call_.count, call_.in_place,
                   call_.input_offset, call_.output_offset, i, laid.input, laid.output);
      CHECK(false);
    }
  }

 private:
  Call call_;
  std::size_t at_;
  std::vector<Data> inputs_, before_, after_;
};

}  // namespace pycollective::testing
