// For fuzzing: programs spoiled at random, and calls whose buffers are as long as they must be and
// no longer.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/api.h"
#include "engine/operations/shards.h"
#include "engine/plans/program.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#endif

namespace pycollective::testing {

using Random = std::mt19937_64;

inline int below(Random& random, std::size_t end) { return static_cast<int>(random() % end); }

inline std::int32_t less_one(std::int32_t number) {
  return number == INT32_MIN ? number : number - 1;
}

// A number that is likely to be one too many, or another's.
inline std::int32_t odd_number(Random& random, const Program& p) {
  const std::int32_t numbers[] = {0,
                                  1,
                                  -1,
                                  2,
                                  3,
                                  p.rank,
                                  p.root,
                                  p.ranks,
                                  p.members,
                                  less_one(p.shards),
                                  p.shards,
                                  less_one(p.nodes),
                                  p.nodes,
                                  less_one(p.items),
                                  p.items,
                                  64,
                                  1 << 20,
                                  INT32_MAX,
                                  INT32_MIN,
                                  static_cast<std::int32_t>(p.refs.size()),
                                  below(random, 8),
                                  below(random, std::max<std::size_t>(p.refs.size(), 1))};
  return numbers[below(random, std::size(numbers))];
}

template <class T>
T* any_of(Random& random, std::vector<T>& list) {
  return list.empty() ? nullptr : &list[static_cast<std::size_t>(below(random, list.size()))];
}

inline void spoil_instructions(Random& random, Program& p) {
  auto& all = p.instructions;
  if (all.empty()) return;
  const auto at = all.begin() + below(random, all.size());
  switch (below(random, 4)) {
    case 0:
      all.erase(at);
      break;
    case 1: {
      const Instruction copy = *at;
      all.insert(all.begin() + below(random, all.size()), copy);
      break;
    }
    case 2:
      std::swap(*at, *any_of(random, all));
      break;
    default:
      at->kind = static_cast<Instruction::Kind>(below(random, 9));
  }
}

inline void spoil_messages(Random& random, Program& p) {
  const std::int32_t number = odd_number(random, p);
  switch (below(random, 8)) {
    case 0:
      if (std::int32_t* piece = any_of(random, p.message_pieces)) *piece = number;
      break;
    case 1:
      if (std::int32_t* peer = any_of(random, p.peers)) *peer = number;
      break;
    case 2:
      std::swap(*any_of(random, p.messages), *any_of(random, p.messages));
      break;
    default: {
      Message& each = *any_of(random, p.messages);
      std::int32_t* fields[] = {&each.rank, &each.step, &each.first_piece, &each.pieces};
      const std::int32_t length = static_cast<std::int32_t>(p.message_pieces.size());
      *fields[below(random, 4)] = below(random, 2) == 0 ? number : below(random, length + 2);
    }
  }
}

inline void spoil(Random& random, Program& p) {
  const std::int32_t number = odd_number(random, p);
  if (!p.messages.empty() && below(random, 3) == 0) return spoil_messages(random, p);
  switch (below(random, 12)) {
    case 0:
    case 1:
    case 2:
      if (Ref* ref = any_of(random, p.refs)) {
        switch (below(random, 4)) {
          case 0:
            ref->place = static_cast<Place>(below(random, 5));
            break;
          case 1:
            ref->member = Member(number);
            break;
          case 2:
            ref->shard = number;
            break;
          default:
            ref->index = number;
        }
      }
      break;
    case 3:
    case 4:
    case 5:
      if (Instruction* each = any_of(random, p.instructions))
        (below(random, 3) == 0 ? each->a : below(random, 2) == 0 ? each->b : each->c) = number;
      break;
    case 6:
      spoil_instructions(random, p);
      break;
    case 7:
      if (CombineStep* each = any_of(random, p.combines)) {
        std::int32_t* fields[] = {&each->first_term, &each->terms, &each->first_recipe,
                                  &each->recipe_length};
        if (const int field = below(random, 5); field < 4)
          *fields[field] = number;
        else
          each->finish = !each->finish;
      }
      break;
    case 8:
      if (std::int32_t* term = any_of(random, p.terms)) *term = number;
      break;
    case 9:
      if (std::uint8_t* step = any_of(random, p.recipes)) *step = std::uint8_t(below(random, 3));
      break;
    case 10:
      if (Member* reader = any_of(random, p.readers)) *reader = Member(number);
      break;
    default: {
      std::int32_t* fields[] = {&p.root,  &p.rank,   &p.ranks, &p.members,
                                &p.steps, &p.shards, &p.nodes, &p.items};
      if (const int field = below(random, 10); field < 8)
        *fields[field] = number;
      else if (field == 8)
        p.kind = static_cast<OpKind>(below(random, kOpKinds + 1));
      else
        p.pieces = static_cast<Pieces>(below(random, 3));
    }
  }
}

// A rank's buffers, each on the heap by itself.
struct Buffers {
  std::unique_ptr<std::byte[]> input;
  std::unique_ptr<std::byte[]> output;
  std::vector<std::byte> given;
};

inline Request request_for(Random& random, const Program& program) {
  constexpr std::pair<Dtype, ReduceOp> kTypes[] = {{Dtype::kFloat16, ReduceOp::kSum},
                                                   {Dtype::kFloat32, ReduceOp::kAvg},
                                                   {Dtype::kInt8, ReduceOp::kSum},
                                                   {Dtype::kFloat64, ReduceOp::kMax}};
  constexpr std::size_t kCounts[] = {0, 1, 5, 64, 129, 700, 3001};
  Request request;
  request.kind = program.kind;
  request.root = program.root;
  std::tie(request.dtype, request.reduce_op) = kTypes[below(random, std::size(kTypes))];
  request.count = kCounts[below(random, std::size(kCounts))];
  if (takes_counts(program.kind) && random() % 2 == 0)
    for (int r = 0; r < program.ranks; ++r)
      request.counts.push_back(r % 2 == 0 ? request.count : request.count / 3);
  return request;
}

// Of rank `rank`, to read and write what this holds from now on.
inline Request call_of(Random& random, const Request& like, int rank, int ranks, Buffers& own) {
  const OperationTraits& traits = traits_of(like.kind);
  Request request = like;
  const std::size_t read = elements_of(traits.input, like, rank, ranks) * size_of(like.dtype);
  const std::size_t written = elements_of(traits.output, like, rank, ranks) * size_of(like.dtype);
  if (read != 0) own.input.reset(new std::byte[read]);
  for (std::size_t i = 0; i < read; ++i) own.input[i] = std::byte(below(random, 100));
  if (written != 0) own.output.reset(new std::byte[written]);
  own.given.assign(own.input.get(), own.input.get() + read);
  request.input = own.input.get();
  request.output = own.output.get();
  return request;
}

inline bool is_as_given(const Buffers& own) {
  return own.given.empty() || std::memcmp(own.given.data(), own.input.get(), own.given.size()) == 0;
}

}  // namespace pycollective::testing
