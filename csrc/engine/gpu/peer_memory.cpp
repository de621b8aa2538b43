#include "engine/gpu/peer_memory.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "engine/shards.h"

namespace pycollective {
namespace {

using cuda::check;
using cuda::Current;
using cuda::driver;

constexpr std::size_t kLineWords = 32;  // a cache line of the GPU's, and two of the host's
constexpr std::size_t kAbortLine = 0;
constexpr std::size_t kReportLine = 1;
constexpr std::size_t kArenaWords = std::size_t{64} << 10;

// Parts are a multiple of so many elements, so that places are aligned for vectors.
constexpr std::size_t kPartUnit = 64;
// With fewer bytes a block's threads have nothing to do.
constexpr std::size_t kSmallestPart = std::size_t{8} << 10;
// With more, a part leaves the cache before peers read it.
constexpr std::size_t kLargestPart = std::size_t{64} << 10;

// Poisoning waits for no kernel, but if other work fills the GPU it must wait for that.
constexpr std::chrono::milliseconds kLongestPoisoning{100};
constexpr std::chrono::microseconds kPoisonPoll{20};

std::uint64_t over(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument(what);
}

std::size_t places_of(const Program& program, Dtype dtype, ReduceOp op) {
  return static_cast<std::size_t>(program.nodes) * node_size(dtype, op) +
         static_cast<std::size_t>(program.items) * size_of(dtype);
}

// Elements of a rank's buffer.
std::size_t held(const Buffer& buffer, const Request& request, const Shards& shards,
                 const Program& program) {
  if (!has(buffer, program.rank, program.root)) return 0;
  if (!in_shards(request.kind)) return request.count;
  if (buffer.holds == Holds::kShard) return shards.length(program.rank);
  return shards.begin(program.ranks - 1) + shards.length(program.ranks - 1);
}

}  // namespace

void PeerMemory::clear(cuda::CUdeviceptr mailbox, const Shape& shape, std::uint32_t first_chunk) {
  cuda::CUstream stream = nullptr;
  check(driver().cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  const auto fill = [&](std::uint64_t from, std::uint64_t end, std::uint32_t value) {
    check(driver().cuMemsetD32Async(mailbox + from, value, (end - from) / sizeof(value), stream),
          "cuMemsetD32Async");
  };
  fill(cuda::kPoisonAt, cuda::flags_at(0), 0);
  fill(cuda::flags_at(0), cuda::flags_at(shape.blocks), cuda::mark_of(first_chunk, 0));
  check(driver().cuStreamSynchronize(stream), "cuStreamSynchronize");
  check(driver().cuStreamDestroy(stream), "cuStreamDestroy");
}

PeerMemory::PeerMemory(const cuda::Kernels& kernels, cuda::CUcontext context, Member me,
                       std::vector<cuda::CUdeviceptr> mailboxes, const Shape& shape)
    : kernels_(kernels),
      context_(context),
      me_(me),
      mailboxes_(std::move(mailboxes)),
      shape_(shape) {
  require(me.at() < mailboxes_.size() && mailboxes_.size() <= cuda::kMostPeers,
          "peer memory of " + std::to_string(mailboxes_.size()) + " ranks");
  require(shape.blocks >= 1 && shape.blocks < (1U << 16) && shape.slot_bytes > 0 &&
              shape.slot_bytes % cuda::kMailboxLine == 0,
          "a mailbox of this shape");
  const Current current(context_);
  try {
    check(driver().cuMemHostAlloc(&words_, 2 * kLineWords * sizeof(std::uint32_t),
                                  cuda::CU_MEMHOSTALLOC_PORTABLE | cuda::CU_MEMHOSTALLOC_DEVICEMAP),
          "cuMemHostAlloc");
    std::memset(words_, 0, 2 * kLineWords * sizeof(std::uint32_t));
    check(driver().cuMemHostGetDevicePointer(&words_on_device_, words_, 0),
          "cuMemHostGetDevicePointer");
    void* marks = nullptr;
    check(driver().cuMemHostAlloc(&marks, shape.blocks * cuda::kMailboxLine,
                                  cuda::CU_MEMHOSTALLOC_PORTABLE),
          "cuMemHostAlloc");
    marks_ = static_cast<std::uint32_t*>(marks);
    check(driver().cuStreamCreate(&uploads_, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    add_arena();
  } catch (...) {
    let_go();
    throw;
  }
}

PeerMemory::~PeerMemory() {
  if (guard_.forked()) return;  // the parent's
  try {
    const Current current(context_);
    let_go();
  } catch (const cuda::DriverError&) {
    // The context is gone, and with it all of this.
  }
}

void PeerMemory::let_go() {
  for (const Arena& arena : arenas_) {
    static_cast<void>(driver().cuMemFree(arena.device));
    static_cast<void>(driver().cuMemFreeHost(arena.host));
  }
  if (uploads_ != nullptr) static_cast<void>(driver().cuStreamDestroy(uploads_));
  if (marks_ != nullptr) static_cast<void>(driver().cuMemFreeHost(marks_));
  if (words_ != nullptr) static_cast<void>(driver().cuMemFreeHost(words_));
}

std::uint32_t* PeerMemory::word(std::size_t line) const {
  return static_cast<std::uint32_t*>(words_) + line * kLineWords;
}

void PeerMemory::abort() { __atomic_store_n(word(kAbortLine), 1, __ATOMIC_RELEASE); }

void PeerMemory::poison() {
  const Current current(context_);
  check(driver().cuMemsetD32Async(
            mailboxes_[me_.at()] + cuda::kPoisonAt,
            cuda::poison_of(cuda::Ending::kAborted, static_cast<std::uint32_t>(me_.index())), 1,
            uploads_),
        "cuMemsetD32Async");
  const auto until = std::chrono::steady_clock::now() + kLongestPoisoning;
  for (;;) {
    const cuda::CUresult result = driver().cuStreamQuery(uploads_);
    if (result != cuda::CUDA_ERROR_NOT_READY) return check(result, "cuStreamQuery");
    if (std::chrono::steady_clock::now() >= until) return;
    std::this_thread::sleep_for(kPoisonPoll);
  }
}

std::vector<bool> PeerMemory::have_done() {
  const Current current(context_);
  check(driver().cuMemcpyAsync(reinterpret_cast<cuda::CUdeviceptr>(marks_),
                               mailboxes_[me_.at()] + cuda::flags_at(0),
                               shape_.blocks * cuda::kMailboxLine, uploads_),
        "cuMemcpyAsync");
  check(driver().cuStreamSynchronize(uploads_), "cuStreamSynchronize");
  std::vector<bool> done(mailboxes_.size(), true);
  for (std::uint32_t block = 0; block < shape_.blocks; ++block) {
    const std::uint32_t* const line = marks_ + block * (cuda::kMailboxLine / sizeof(*marks_));
    for (std::size_t member = 0; member < done.size(); ++member)
      if (!cuda::has_come(line[member], line[me_.at()])) done[member] = false;
  }
  return done;
}

std::optional<PeerMemory::Ended> PeerMemory::ending() const {
  const std::uint32_t said = __atomic_load_n(word(kReportLine), __ATOMIC_ACQUIRE);
  if (said == 0) return std::nullopt;
  return Ended{static_cast<cuda::Ending>(said & 0xFF), Member(static_cast<int>(said >> 8 & 0xFF)),
               static_cast<int>(said >> 16)};
}

void PeerMemory::add_arena() {
  void* host = nullptr;
  check(driver().cuMemHostAlloc(&host, kArenaWords * sizeof(std::uint32_t), 0), "cuMemHostAlloc");
  Arena arena;
  arena.host = static_cast<std::uint32_t*>(host);
  const cuda::CUresult made =
      driver().cuMemAlloc(&arena.device, kArenaWords * sizeof(std::uint32_t));
  if (made != cuda::CUDA_SUCCESS) static_cast<void>(driver().cuMemFreeHost(host));
  check(made, "cuMemAlloc");
  arenas_.push_back(arena);
}

const PeerMemory::Uploaded* PeerMemory::find(const Program& program) const {
  const auto found = programs_.find(&program);
  return found == programs_.end() ? nullptr : &found->second;
}

// By a stream of its own, which waits for no kernel.
const PeerMemory::Uploaded& PeerMemory::put(const std::shared_ptr<const Program>& program) {
  require(program->rank == me_.index() && program->ranks == static_cast<int>(mailboxes_.size()) &&
              program->members == program->ranks,
          "the program of '" + program->algorithm + "' is another rank's or communicator's");
  Uploaded made{program, lower_for_device(*program, me_), 0};
  const std::vector<std::uint32_t>& words = made.lowered.words;
  const Current current(context_);
  if (arenas_.back().used + words.size() > kArenaWords) add_arena();
  Arena& arena = arenas_.back();
  const std::size_t bytes = words.size() * sizeof(std::uint32_t);
  made.words = arena.device + arena.used * sizeof(std::uint32_t);
  std::uint32_t* const staged = arena.host + arena.used;
  std::memcpy(staged, words.data(), bytes);
  check(driver().cuMemcpyAsync(made.words, reinterpret_cast<cuda::CUdeviceptr>(staged), bytes,
                               uploads_),
        "cuMemcpyAsync");
  check(driver().cuStreamSynchronize(uploads_), "cuStreamSynchronize");
  arena.used += over(words.size(), kLineWords) * kLineWords;
  return programs_.emplace(program.get(), std::move(made)).first->second;
}

void PeerMemory::upload(const std::shared_ptr<const Program>& program) {
  if (find(*program) == nullptr) put(program);
}

bool PeerMemory::has_room(const Program& program, Dtype dtype, ReduceOp op) const {
  return places_of(program, dtype, op) * kPartUnit <= shape_.slot_bytes;
}

PeerMemory::Cut PeerMemory::cut(std::uint64_t longest, std::size_t element, std::size_t places,
                                const Shape& shape) {
  const auto units = [&](std::uint64_t elements) { return over(elements, kPartUnit) * kPartUnit; };
  const std::uint64_t fits =
      places == 0 ? kLargestPart / element : shape.slot_bytes / places / kPartUnit * kPartUnit;
  const std::uint64_t most = std::min<std::uint64_t>(fits, kLargestPart / element);
  const std::uint64_t least = std::min<std::uint64_t>(most, kSmallestPart / element);
  // Each block has a part in each round; parts are as even as possible.
  const std::uint64_t rounds = std::max<std::uint64_t>(over(longest, most * shape.blocks), 1);
  const std::uint64_t part = std::clamp(units(over(longest, rounds * shape.blocks)), least, most);
  const std::uint64_t chunks = over(longest, part);
  return {part, chunks, static_cast<unsigned>(std::min<std::uint64_t>(chunks, shape.blocks))};
}

void PeerMemory::launch(const Task& task, cuda::CUstream stream, std::uint64_t nanoseconds) {
  const Request& request = *task.request;
  require(
      task.program != nullptr && request.kind != OpKind::kBarrier && task.program->serves(request),
      std::string(name_of(request.kind)) + ": the program is another call's");
  const Program& program = *task.program;
  require(
      request.counts.empty() || request.counts.size() == static_cast<std::size_t>(program.ranks),
      std::string(name_of(request.kind)) + ": counts of other ranks");
  require(has_room(program, request.dtype, request.reduce_op),
          std::string(name_of(request.kind)) + ": algorithm '" + program.algorithm + "' needs " +
              std::to_string(places_of(program, request.dtype, request.reduce_op) * kPartUnit) +
              " bytes of each slot, and they have " + std::to_string(shape_.slot_bytes));
  const cuda::Kernel& kernel = reduces(request.kind)
                                   ? kernels_.program(request.dtype, request.reduce_op)
                                   : kernels_.moving_program();
  require(kernel.function != nullptr, std::string(name_of(request.reduce_op)) +
                                          " has no meaning for " + name_of(request.dtype));
  const Shards shards = shards_of(request, program);
  const std::size_t element = size_of(request.dtype);
  const Cut cut = PeerMemory::cut(shards.longest(), element,
                                  places_of(program, request.dtype, request.reduce_op), shape_);
  if (cut.chunks == 0) return;
  require(over(cut.chunks, cut.blocks) < cuda::kMostChunks && cut.chunks < (1U << 31),
          std::string(name_of(request.kind)) + ": so many elements, in slots so small");

  const Current current(context_);
  const Uploaded* known = find(program);
  if (known == nullptr) known = &put(task.program);

  cuda::ProgramParameters p{};
  for (std::size_t m = 0; m < mailboxes_.size(); ++m)
    p.mailboxes[m] = reinterpret_cast<void*>(mailboxes_[m]);
  p.words = reinterpret_cast<const std::uint32_t*>(known->words);
  const OperationTraits& traits = traits_of(request.kind);
  // An empty buffer's address may be invalid.
  if (held(traits.input, request, shards, program) != 0) p.input = request.input;
  void* const output = output_of(request, program.rank);
  if (held(traits.output, request, shards, program) != 0 || output == p.input) p.output = output;
  p.abort = reinterpret_cast<const std::uint32_t*>(words_on_device_) + kAbortLine * kLineWords;
  p.report = reinterpret_cast<std::uint32_t*>(words_on_device_) + kReportLine * kLineWords;
  const int begins = program.pieces == Pieces::kPairs ? program.ranks : program.shards;
  for (int shard = 0; shard < begins; ++shard) p.begins[shard] = shards.begin(shard);
  p.begins[begins] = shards.begin(begins - 1) + shards.length(begins - 1);
  p.begins[cuda::kNoBegin] = 0;
  p.part = cut.part;
  p.chunks = static_cast<std::uint32_t>(cut.chunks);
  p.nanoseconds = nanoseconds;
  p.readers = known->lowered.readers;
  p.shape = shape_;
  p.word_count = static_cast<std::uint32_t>(known->lowered.words.size());
  p.ref_count = known->lowered.ref_count;
  p.members = static_cast<std::uint32_t>(mailboxes_.size());
  p.me = static_cast<std::uint32_t>(me_.index());
  p.nodes = static_cast<std::uint32_t>(program.nodes);
  p.element = static_cast<std::uint32_t>(element);
  p.node = static_cast<std::uint32_t>(node_size(request.dtype, request.reduce_op));
  cuda::launch_program(kernel, p, cut.blocks, stream);
}

}  // namespace pycollective
