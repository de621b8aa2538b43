#include "engine/task.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/shards.h"
#include "shared_memory/layout.h"

namespace pycollective {
namespace {

struct Span {
  const std::byte* begin;
  std::size_t bytes;
  bool overlaps(const Span& other) const {
    return bytes != 0 && other.bytes != 0 && begin < other.begin + other.bytes &&
           other.begin < begin + bytes;
  }
};

class Checker {
 public:
  Checker(const Request& request, int rank, int size)
      : request_(request), traits_(traits_of(request.kind)), rank_(rank), size_(size) {}

  void check() const {
    const OpKind kind = request_.kind;
    if (reduces(kind) && !is_defined(request_.dtype, request_.reduce_op))
      refuse(std::string(name_of(request_.reduce_op)) + " has no meaning for " +
             name_of(request_.dtype));
    const bool any = kind == OpKind::kRecv && request_.root == kAnySource;
    if ((traits_.rooted || traits_.pair) && !any && (request_.root < 0 || request_.root >= size_))
      refuse("rank " + std::to_string(request_.root) + " is not one of 0 to " +
             std::to_string(size_ - 1));
    if (traits_.pair && request_.root == rank_)
      refuse("a rank cannot send to or receive from itself: copy the array");
    if (any && size_ == 1) refuse("there is no other rank to receive from");
    if (request_.all_to_all_v) return check_all_to_all_v();
    if (request_.nodes) check_nodes(*request_.nodes);
    if (!request_.counts.empty()) check_counts();
    check_size();
    check_buffers();
  }

 private:
  static constexpr std::size_t kMost = SIZE_MAX / 16 / sizeof(double) / kCountableRanks;

  void check_counts() const {
    if (!takes_counts(request_.kind)) refuse("takes no counts");
    if (request_.counts.size() != static_cast<std::size_t>(size_))
      refuse("counts has " + std::to_string(request_.counts.size()) + " entries for " +
             std::to_string(size_) + " ranks");
  }

  void check_all_to_all_v() const {
    const std::vector<AllToAllVPart>& all = *request_.all_to_all_v;
    if (request_.kind != OpKind::kAllToAll || !request_.location.on_host())
      refuse("takes no uneven parts");
    if (all.size() != static_cast<std::size_t>(size_))
      refuse("there are " + std::to_string(all.size()) + " parts for " + std::to_string(size_) +
             " ranks");
    const AllToAllVPart& own = all[static_cast<std::size_t>(rank_)];
    if (own.send_count != own.recv_count)
      refuse("rank " + std::to_string(rank_) + " sends itself " + std::to_string(own.send_count) +
             " elements and expects " + std::to_string(own.recv_count));
    std::size_t left[2] = {kMost, kMost};
    for (const AllToAllVPart& each : all) {
      if (each.send_count > left[0] || each.recv_count > left[1]) refuse("the parts are too large");
      left[0] -= each.send_count;
      left[1] -= each.recv_count;
      if ((each.send_count != 0 && each.input == nullptr) ||
          (each.recv_count != 0 && each.output == nullptr))
        refuse("a buffer is missing");
    }
    check_all_to_all_v_buffers(all);
  }

  // What comes from one rank must lie apart from what comes from the others, and from all that is
  // sent: a part may arrive before another has left. The own part may stay where it is.
  void check_all_to_all_v_buffers(const std::vector<AllToAllVPart>& all) const {
    const std::size_t size = size_of(request_.dtype);
    const auto span = [size](const void* at, std::size_t count) {
      return Span{static_cast<const std::byte*>(at), count * size};
    };
    const AllToAllVPart& own = all[static_cast<std::size_t>(rank_)];
    const bool stays = own.input == own.output;
    std::vector<Span> outputs;
    for (const AllToAllVPart& each : all)
      if (each.recv_count != 0) outputs.push_back(span(each.output, each.recv_count));
    const auto before = [](const Span& a, const Span& b) { return a.begin < b.begin; };
    std::sort(outputs.begin(), outputs.end(), before);
    for (std::size_t i = 1; i < outputs.size(); ++i)
      if (outputs[i - 1].overlaps(outputs[i])) refuse("two outputs overlap");
    for (const AllToAllVPart& each : all) {
      const Span input = span(each.input, each.send_count);
      auto output = std::upper_bound(outputs.begin(), outputs.end(), input, before);
      if (output != outputs.begin()) --output;
      for (; output != outputs.end() && output->begin < input.begin + input.bytes; ++output)
        if (input.overlaps(*output) && !(stays && &each == &own && output->begin == input.begin))
          refuse("an input and an output overlap");
    }
  }

  void check_nodes(const DealtNodes& nodes) const {
    const bool floats = traits_of(request_.dtype).numbers == Numbers::kFloat &&
                        traits_of(request_.dtype).accumulator == sizeof(float);
    const bool sums = request_.reduce_op == ReduceOp::kSum || request_.reduce_op == ReduceOp::kAvg;
    if (!reduces(request_.kind) || !floats || !sums || !request_.location.on_host() ||
        request_.input != nullptr || nodes.dtype != request_.dtype ||
        nodes.reduce_op != request_.reduce_op)
      refuse("nodes are summed or averaged, to a float of the host's memory, up to float32");
    if (!(nodes.divisor > 0 && std::isfinite(nodes.divisor))) refuse("the divisor is not above 0");
  }

  // So that no sum or product of sizes wraps, whatever is made of them.
  void check_size() const {
    std::size_t left = kMost;
    if (request_.counts.empty() && request_.count > kMost / static_cast<std::size_t>(size_))
      refuse("the count is too large");
    for (const std::size_t count : request_.counts) {
      if (count > left) refuse("the counts are too large");
      left -= count;
    }
  }

  std::size_t shard_begin() const {
    if (request_.counts.empty()) return request_.count * static_cast<std::size_t>(rank_);
    return std::accumulate(request_.counts.begin(), request_.counts.begin() + rank_,
                           std::size_t{0});
  }
  // What this rank reads and writes, and how the two may lie: equal, or the output exactly the own
  // shard of the input, or the other way round.
  void check_buffers() const {
    const std::size_t size = size_of(request_.dtype);
    const auto* in = static_cast<const std::byte*>(request_.input);
    const auto* out = static_cast<const std::byte*>(request_.output);
    const std::size_t read = elements_of(traits_.input, request_, rank_, size_);
    const std::size_t written = elements_of(traits_.output, request_, rank_, size_);
    if (request_.nodes) {
      const Span output{out, written * size};
      if (written != 0 && out == nullptr) refuse("a buffer is missing");
      for (const float* row : request_.nodes->rows) {
        if (read != 0 && row == nullptr) refuse("a buffer is missing");
        if (Span{reinterpret_cast<const std::byte*>(row), read * sizeof(float)}.overlaps(output))
          refuse("the output overlaps what the accumulator holds");
      }
      return;
    }
    // Where the output may begin inside of, or around, the input.
    const std::byte* in_place = in;
    if (in != nullptr && traits_.pieces == Pieces::kRanks)
      in_place = traits_.input.holds == Holds::kAllShards ? in + shard_begin() * size
                                                          : in - shard_begin() * size;
    if ((read != 0 && in == nullptr) || (written != 0 && out == nullptr))
      refuse("a buffer is missing");
    const Span input{in, read * size};
    const Span output{out, written * size};
    if (input.overlaps(output) && out != in_place)
      refuse("input and output overlap without being in place");
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw CollectiveFailure({FailureKind::kConfiguration, rank_, request_.kind, 0,
                             std::string(name_of(request_.kind)) + ": " + why});
  }

  const Request& request_;
  const OperationTraits& traits_;
  int rank_;
  int size_;
};

}  // namespace

void validate(const Request& request, int rank, int size) { Checker(request, rank, size).check(); }

}  // namespace pycollective
