// Program::check is a proof: no program that passes touches what is not its own. Real programs are
// spoiled at random, and what still passes is run, with ASan as the judge: the caller's buffers are
// as long as they must be and no longer, and of shared memory all is poisoned but the slots.
//
//   test_program_fuzz [seconds] [seed]
//
// Ranks are on one host or on several, and any of them may have a spoiled plan, so messages may
// have another length than is awaited, other lanes, other receivers, or be missing. Other runs
// spoil packed messages of ranks with right plans on the way.
//
// One thread drives all ranks in turn. A run ends with all done, with errors, or with no rank going
// on. Each rank writes only what its own plan may write.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/internode/messenger.h"
#include "engine/operations/scheduled.h"
#include "engine/shards.h"
#include "tests/check.h"
#include "tests/host_ranks.h"
#include "tests/program_text.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) ((void)(begin), (void)(bytes))
#endif

using namespace pycollective;
using namespace pycollective::testing;

namespace {

using Random = std::mt19937_64;

int below(Random& random, std::size_t end) { return static_cast<int>(random() % end); }

std::int32_t less_one(std::int32_t number) { return number == INT32_MIN ? number : number - 1; }

// A number that is likely to be one too many, or another's.
std::int32_t odd_number(Random& random, const Program& p) {
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

void spoil_instructions(Random& random, Program& p) {
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

void spoil_messages(Random& random, Program& p) {
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

void spoil(Random& random, Program& p) {
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
      std::int32_t* fields[] = {&p.root,   &p.rank,  &p.ranks, &p.members, &p.steps,
                                &p.shards, &p.nodes, &p.items, &p.leaves,  &p.rows};
      if (const int field = below(random, 12); field < 10)
        *fields[field] = number;
      else if (field == 10)
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
  std::vector<std::unique_ptr<float[]>> rows;  // of what was dealt, in place of the input
};

Request request_for(Random& random, const Program& program) {
  constexpr std::pair<Dtype, ReduceOp> kTypes[] = {{Dtype::kFloat16, ReduceOp::kSum},
                                                   {Dtype::kFloat32, ReduceOp::kAvg},
                                                   {Dtype::kInt8, ReduceOp::kSum},
                                                   {Dtype::kFloat64, ReduceOp::kMax}};
  constexpr std::size_t kCounts[] = {0, 1, 5, 64, 129, 700, 3001};
  Request request;
  request.kind = program.kind;
  request.root = program.root;
  // Of what was dealt, a sum or an average of floats.
  const std::size_t types = program.leaves != 0 ? 2 : std::size(kTypes);
  std::tie(request.dtype, request.reduce_op) = kTypes[below(random, types)];
  request.count = kCounts[below(random, std::size(kCounts))];
  if (takes_counts(program.kind) && random() % 2 == 0)
    for (int r = 0; r < program.ranks; ++r)
      request.counts.push_back(r % 2 == 0 ? request.count : request.count / 3);
  return request;
}

// Of rank `rank`, to read and write what this holds from now on.
Request call_of(Random& random, const Request& like, const Program& program, Buffers& own) {
  const int rank = program.rank, ranks = program.ranks;
  const OperationTraits& traits = traits_of(like.kind);
  Request request = like;
  std::size_t read = elements_of(traits.input, like, rank, ranks) * size_of(like.dtype);
  if (program.leaves != 0) {
    DealtNodes nodes;
    nodes.leaves = program.leaves;
    nodes.divisor = 3;
    nodes.dtype = like.dtype;
    nodes.reduce_op = like.reduce_op;
    const std::size_t elements = read / size_of(like.dtype);
    for (int row = 0; row < program.rows; ++row) {
      own.rows.emplace_back(new float[elements]);
      std::fill_n(own.rows.back().get(), elements, float(row));
      nodes.rows.push_back(own.rows.back().get());
    }
    request.nodes = std::make_shared<const DealtNodes>(std::move(nodes));
    read = 0;
  }
  const std::size_t written = elements_of(traits.output, like, rank, ranks) * size_of(like.dtype);
  if (read != 0) own.input.reset(new std::byte[read]);
  for (std::size_t i = 0; i < read; ++i) own.input[i] = std::byte(below(random, 100));
  if (written != 0) own.output.reset(new std::byte[written]);
  own.given.assign(own.input.get(), own.input.get() + read);
  request.input = own.input.get();
  request.output = own.output.get();
  return request;
}

bool is_as_given(const Buffers& own) {
  return own.given.empty() || std::memcmp(own.given.data(), own.input.get(), own.given.size()) == 0;
}

constexpr std::size_t kDataBytes = std::size_t{32} << 10;
constexpr int kMostTurns = 300;
constexpr int kLongestDelay = 3;

using Schedule = std::vector<RealProgram>;

std::vector<int> host_sizes(const Schedule& schedule) {
  std::vector<int> sizes;
  for (std::size_t next = 0; next < schedule.size();
       next += static_cast<std::size_t>(schedule[next].program.members))
    sizes.push_back(schedule[next].program.members);
  return sizes;
}

bool is_on_one_host(const Schedule& schedule) { return host_sizes(schedule).size() == 1; }

struct Counts {
  long refused = 0;
  long run = 0;
  long finished = 0;  // all ranks
  long failed = 0;    // some rank has an error
};

// One rank, which runs its plan as a Communicator does.
class Rank {
 public:
  Rank(Group& group, const Request& request) : group_(group), request_(request) {
    for_slots([](std::byte* data, std::byte* slots, std::size_t bytes) {
      ASAN_POISON_MEMORY_REGION(data, static_cast<std::size_t>(slots - data));
      ASAN_POISON_MEMORY_REGION(slots + bytes, kPage);
    });
  }
  ~Rank() {
    operation_.reset();
    for_slots([](std::byte* data, std::byte* slots, std::size_t bytes) {
      ASAN_UNPOISON_MEMORY_REGION(data, static_cast<std::size_t>(slots - data));
      ASAN_UNPOISON_MEMORY_REGION(slots + bytes, kPage);
    });
  }

  // Whether anything has happened.
  bool step() {
    if (over()) return false;
    const std::vector<std::byte> before = others();
    State state = State::kProgressed;
    try {
      if (operation_ == nullptr) {
        operation_ = std::make_unique<Scheduled>(group_, task_, 1);
        operation_->start();
      } else {
        state = operation_->advance();
      }
    } catch (const CollectiveFailure& error) {
      if (group_.messenger() == nullptr) throw;  // on one host no plan makes one fail
      failed_ = true;
      group_.messenger()->tell({error.failure().kind, request_.root, error.failure().message},
                               true);
    }
    CHECK(others() == before);  // it writes no peer's slots
    done_ = state == State::kDone;
    return state != State::kBlocked;
  }
  bool over() const { return done_ || failed_; }
  bool done() const { return done_; }
  bool failed() const { return failed_; }

 private:
  template <class Act>
  void for_slots(const Act& act) const {
    for (const Member each : group_.members())
      act(group_.data(each), group_.slots(each), group_.slots_bytes());
  }
  std::vector<std::byte> others() const {
    std::vector<std::byte> all;
    const std::byte* mine = group_.data(group_.me());
    for_slots([&](std::byte* data, std::byte* slots, std::size_t bytes) {
      if (data != mine) all.insert(all.end(), slots, slots + bytes);
    });
    return all;
  }

  Group& group_;
  const Request& request_;
  const Task task_{request_};
  std::unique_ptr<Scheduled> operation_;
  bool done_ = false;
  bool failed_ = false;
};

enum class Spoils {
  kNothing,   // all must come to an end
  kPrograms,  // of some ranks
  kMessages,  // packed ones
};

// Some bits, or the length of the first piece or its first header.
void spoil_message(Random& random, std::byte* data, std::size_t bytes) {
  if (bytes == 0 || below(random, 3) == 0) return;
  std::uint32_t length = 0;
  if (below(random, 2) == 0) {
    for (int changes = 1 + below(random, 3); changes > 0; --changes)
      data[below(random, bytes)] ^= std::byte(1 << below(random, 8));
  } else if (below(random, 2) == 0 && bytes >= sizeof(length)) {
    std::memcpy(&length, data, sizeof(length));
    const std::uint32_t lengths[] = {0, length - 1, length + 1, length / 2, 1U << 20, UINT32_MAX};
    std::memcpy(data, lengths + below(random, std::size(lengths)), sizeof(length));
  } else {
    for (std::size_t i = sizeof(length); i < bytes && i < 2 * sizeof(length); ++i)
      data[i] = std::byte(below(random, 256));
  }
}

// Ranks of one host serve again, as they were: to make them takes longest.
HostRanks& on_one_host(int ranks) {
  static FakeNetwork unused(1, {});
  static std::map<int, std::unique_ptr<HostRanks>> made;
  std::unique_ptr<HostRanks>& hosts = made[ranks];
  if (hosts == nullptr)
    hosts = std::make_unique<HostRanks>(std::vector<int>{ranks}, unused, kDataBytes);
  Group& group = *hosts->group(0);
  for (const Member each : group.members()) {
    Mailbox& mailbox = group.mailbox(each);
    for (Arrival& arrival : mailbox.arrival) arrival.sequence = 0;
    mailbox.progress.copied_in = mailbox.progress.combined = 0;
    for (auto& published : mailbox.published) published.mark = 0;
  }
  return *hosts;
}

void run(Random& random, const Schedule& schedule, Spoils spoils, Counts& counts) {
  const int n = static_cast<int>(schedule.size());
  const Request like = request_for(random, schedule.front().program);
  std::vector<std::shared_ptr<Program>> programs;
  bool spoiled = false;
  for (const RealProgram& real : schedule) {
    programs.push_back(std::make_shared<Program>(real.program));
    if (spoils != Spoils::kPrograms || below(random, 2) == 0) continue;
    auto other = std::make_shared<Program>(real.program);
    for (int changes = 1 + below(random, 3); changes > 0; --changes) spoil(random, *other);
    try {
      other->check(real.me);
      programs.back() = std::move(other);
      spoiled = true;
    } catch (const std::invalid_argument&) {
      ++counts.refused;
    }
  }
  if (spoils == Spoils::kPrograms && !spoiled) return;
  FakeNetwork network(n, {static_cast<unsigned>(random()), below(random, kLongestDelay + 1), false,
                          true, false, false});
  const Wire wire =
      spoils == Spoils::kMessages || below(random, 2) == 0 ? Wire::kExact : Wire::kRaw;
  if (spoils == Spoils::kMessages)
    network.spoil_with([&random](int, int, std::byte* data, std::size_t bytes) {
      spoil_message(random, data, bytes);
    });
  std::optional<HostRanks> several;
  if (!is_on_one_host(schedule)) several.emplace(host_sizes(schedule), network, kDataBytes);
  HostRanks& hosts = several ? *several : on_one_host(n);
  std::vector<Request> requests(static_cast<std::size_t>(n));
  std::vector<Buffers> buffers(static_cast<std::size_t>(n));
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < n; ++r) {
    const auto at = static_cast<std::size_t>(r);
    requests[at] = call_of(random, like, schedule[at].program, buffers[at]);
    requests[at].program = programs[at];
    requests[at].wire = wire;
    try {
      Scheduled::require_fit(*hosts.group(r), Task(requests[at]));
    } catch (const CollectiveFailure&) {
      ++counts.refused;
      ranks.clear();
      break;
    }
    ranks.push_back(std::make_unique<Rank>(*hosts.group(r), requests[at]));
  }
  if (!ranks.empty()) {
    int idle = 0;
    for (int turn = 0; idle <= kLongestDelay + 1 && turn < kMostTurns; ++turn) {
      bool progressed = false;
      for (const auto& each : ranks) progressed |= each->step();
      idle = progressed ? 0 : idle + 1;
    }
    const auto count = [&](bool (Rank::*is)() const) {
      return std::count_if(ranks.begin(), ranks.end(), [&](const auto& r) { return (*r.*is)(); });
    };
    ++counts.run;
    counts.finished += count(&Rank::done) == n;
    counts.failed += count(&Rank::failed) != 0;
    CHECK(spoils != Spoils::kNothing || count(&Rank::done) == n);
  }
  ranks.clear();
  for (const Buffers& own : buffers) CHECK(is_as_given(own));
  for (int r = 0; several && r < n; ++r) hosts.group(r)->leave();
}

}  // namespace

int main(int arguments, char** argument) {
  const double seconds = arguments > 1 ? std::atof(argument[1]) : 10;
  const std::uint64_t seed = arguments > 2 ? std::strtoull(argument[2], nullptr, 10) : 1;
  std::vector<Schedule> schedules = read_programs("programs.txt");
  for (Schedule& dealt : read_programs("dealt_programs.txt")) schedules.push_back(std::move(dealt));
  CHECK(!schedules.empty());
  Random random(seed);
  Counts right;
  for (const Schedule& each : schedules) run(random, each, Spoils::kNothing, right);
  CHECK(right.finished == static_cast<long>(schedules.size()) && right.failed == 0);
  Counts counts, hostile;
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const auto shown = [&] {  // on a busy machine it takes longer to see one of each
    return counts.refused > 0 && counts.failed > 0 && hostile.finished > 0 && hostile.failed > 0;
  };
  while (elapsed() < seconds || (!shown() && elapsed() < seconds + 60)) {
    const Schedule& any = *std::next(schedules.begin(), below(random, schedules.size()));
    // The first half of the time is for one host.
    const bool first_half = elapsed() < seconds / 2;
    if (first_half != is_on_one_host(any)) continue;
    if (first_half || below(random, 2) == 0)
      run(random, any, Spoils::kPrograms, counts);
    else
      run(random, any, Spoils::kMessages, hostile);
  }
  CHECK(shown() && hostile.refused == 0);
  std::printf(
      "program fuzz: passed (seed %llu: %ld refused, %ld run, %ld finished, %ld with errors; %ld "
      "hostile: %ld finished, %ld with errors)\n",
      static_cast<unsigned long long>(seed), counts.refused, counts.run, counts.finished,
      counts.failed, hostile.run, hostile.finished, hostile.failed);
}
