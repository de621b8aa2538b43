// Kernels: fibers that wait for each other, in one launch and in several; what is an error by name.
#include <algorithm>
#include <numeric>
#include <set>

#include "test_session.h"

using namespace standin::testing;

namespace {

constexpr bool kThreadSanitizer =
#if defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(modules_are_images_of_named_kernels) {
  const Session session;
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  OK(cu().cuModuleLoadDataEx(&module, "\177ELF    ", 0, nullptr, nullptr));
  OK(cu().cuModuleLoadDataEx(&module, "// PTX\n.version 9.0\n", 0, nullptr, nullptr));
  EXPECT(CUDA_ERROR_INVALID_IMAGE,
         cu().cuModuleLoadDataEx(&module, "#include <x>", 0, nullptr, nullptr));
  EXPECT(CUDA_ERROR_NOT_FOUND, cu().cuModuleGetFunction(&function, module, "no_such_kernel"));
  OK(cu().cuModuleGetFunction(&function, module, "test_copy"));
  int value = 0;
  OK(cu().cuFuncGetAttribute(&value, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
  CHECK(value == 64);
  OK(cu().cuOccupancyMaxActiveBlocksPerMultiprocessor(&value, function, 64, 0));
  CHECK(value == 4);
  const CUstream stream = new_stream();
  EXPECT(CUDA_ERROR_INVALID_VALUE, launch(function, kernels::Copy{}, 1, 65, stream));
  EXPECT(CUDA_ERROR_INVALID_VALUE, launch(function, kernels::Copy{}, 0, 1, stream));
  OK(cu().cuModuleUnload(module));
  EXPECT(CUDA_ERROR_INVALID_HANDLE, launch(function, kernels::Copy{}, 1, 1, stream));
}

TEST(blocks_share_memory_and_barriers) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr from = device_words(1000), to = device_words(40);
  std::vector<std::uint32_t> host(1000);
  std::iota(host.begin(), host.end(), 1);
  OK(cu().cuMemcpyHtoDAsync(from, host.data(), 4000, stream));
  for (const unsigned blocks : {1u, 2u, 8u, 40u})  // 40: more than are there at once
    for (const unsigned threads : {1u, 8u, 64u}) {
      OK(launch(session.function("test_sum"), kernels::Copy{at(from), at(to), 1000}, blocks,
                threads, stream));
      const std::vector<std::uint32_t> sums = read(to, blocks, stream);
      CHECK(std::accumulate(sums.begin(), sums.end(), 0u) == 500'500);
    }
}

PART(one_leaves) {
  const Session session;
  const CUstream stream = new_stream();
  OK(launch(session.function("test_one_leaves"), kernels::Copy{}, 1, 8, stream));
  EXPECT(CUDA_ERROR_LAUNCH_FAILED, cu().cuStreamSynchronize(stream));
  EXPECT(CUDA_ERROR_LAUNCH_FAILED, launch(nullptr, kernels::Copy{}, 1, 8, stream));
}
PART(two_barriers) {
  const Session session;
  const CUstream stream = new_stream();
  OK(launch(session.function("test_two_barriers"), kernels::Copy{}, 1, 8, stream));
  EXPECT(CUDA_ERROR_LAUNCH_FAILED, cu().cuStreamSynchronize(stream));
}
TEST(a_barrier_that_some_miss_is_an_error_by_name) {
  const std::string left = run_part("one_leaves");
  CHECK(says(left, "kernel `test_one_leaves`") && says(left, "barrier() (line "));
  const std::string two = run_part("two_barriers");
  CHECK(says(two, "kernel `test_two_barriers`") && says(two, "barrier_or() (line "));
}

PART(racing_threads) {
  const Session session;
  const CUstream stream = new_stream();
  OK(launch(session.function("test_sum_racing"), kernels::Copy{nullptr, at(device_words(1)), 0}, 1,
            16, stream));
  OK(cu().cuStreamSynchronize(stream));
}
TEST(a_race_in_a_block_is_seen) {
  const auto [said, status] = Process("racing_threads").end();
  if (kThreadSanitizer)
    CHECK(says(said, "data race") && says(said, "test_kernels.cu"));
  else
    CHECK(ended_well(status));
}

namespace {

struct Side {
  CUdeviceptr data, own, got, ended;
};

Side side() {
  const Side made{device_words(64), device_words(1), device_words(64), device_words(1)};
  OK(cu().cuMemsetD32Async(made.own, 0, 1, nullptr));
  OK(cu().cuMemsetD32Async(made.ended, 9, 1, nullptr));
  OK(cu().cuStreamSynchronize(nullptr));
  return made;
}

kernels::Exchange exchange(const Side& own, const Side& other, std::uint32_t value,
                           std::uint64_t nanoseconds, CUdeviceptr abort = 0,
                           kernels::Fault fault = kernels::Fault::kNone) {
  kernels::Exchange p{};
  p.data = at(own.data);
  p.own = at(own.own);
  p.peer_data = at(other.data);
  p.other = at(other.own);
  p.abort = at(abort);
  p.got = at(own.got);
  p.ended = at(own.ended);
  p.value = value;
  p.words = 64;
  p.fault = fault;
  p.nanoseconds = nanoseconds;
  return p;
}

constexpr std::uint64_t kMinute = 60'000'000'000;

}  // namespace

// Exits with 1 where a kernel got what the other had not yet written.
PART(exchanges_between_streams) {
  const Session session;
  const char* const planted = std::getenv("TEST_FAULT");
  const auto fault = static_cast<kernels::Fault>(planted ? std::atoi(planted) : 0);
  const CUfunction function = session.function("test_exchange");
  const CUstream streams[] = {new_stream(), new_stream()};
  const Side sides[] = {side(), side()};
  for (std::uint32_t value = 1; value <= 5; ++value) {
    for (int i = 0; i < 2; ++i)
      OK(launch(function, exchange(sides[i], sides[1 - i], 100 * value, kMinute, 0, fault), 1, 64,
                streams[i]));
    for (int i = 0; i < 2; ++i) {
      const std::vector<std::uint32_t> got = read(sides[i].got, 64, streams[i]);
      for (unsigned j = 0; j < 64; ++j)
        if (got[j] != 100 * value + j) _exit(1);
    }
    // Nothing but this orders the next launch after the peer's reads.
    for (const CUstream stream : streams) OK(cu().cuStreamSynchronize(stream));
  }
}
TEST(kernels_of_two_streams_wait_for_each_other) {
  run_part("exchanges_between_streams");
  for (const char* seed : {"1", "2", "3"})
    run_part("exchanges_between_streams", {{"PYCOLLECTIVE_STANDIN_SEED", seed}});
}
TEST(a_relaxed_flag_is_seen_by_the_thread_sanitizer) {
  const auto [said, status] = Process("exchanges_between_streams", {{"TEST_FAULT", "1"}}).end();
  if (kThreadSanitizer)
    CHECK(says(said, "data race") && says(said, "test_exchange"));
  else
    CHECK(ended_well(status));  // processors of today's machines are kinder than the language
}
TEST(a_flag_before_its_data_is_seen_by_some_interleaving) {
  int seen = 0;
  for (int seed = 1; seed <= 10; ++seed) {
    const auto [said, status] =
        Process("exchanges_between_streams",
                {{"TEST_FAULT", "2"}, {"PYCOLLECTIVE_STANDIN_SEED", std::to_string(seed)}})
            .end();
    if (kThreadSanitizer) {
      CHECK(says(said, "data race") && says(said, "test_exchange"));
      return;
    }
    seen += !ended_well(status);
  }
  CHECK(seen > 0);
}

TEST(waits_end_at_their_deadline_and_by_the_abort_word) {
  const Session session;
  const CUfunction function = session.function("test_exchange");
  const CUstream stream = new_stream();
  const Side own = side(), silent = side();
  OK(launch(function, exchange(own, silent, 1, 20'000'000), 1, 64, stream));
  CHECK(read(own.ended, 1, stream)[0] == 1);
  const Gate abort(session);
  OK(launch(function, exchange(own, silent, 1, kMinute, abort.address), 1, 64, stream));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuStreamQuery(stream));
  abort.open();
  CHECK(read(own.ended, 1, stream)[0] == 2);
}

// Sixteen blocks of 64 are all that a device holds: one that waits for another waits for ever.
TEST(blocks_that_wait_must_fit_the_device) {
  const Session session;
  const CUfunction wait = session.function("test_wait"), copy = session.function("test_copy");
  const Gate gate(session);
  const CUstream full = new_stream(), other = new_stream();
  const CUdeviceptr from = device_words(64), to = device_words(64);
  const Gate waiting(session);
  OK(launch(wait, kernels::Wait{at(gate.address), 1, at(waiting.address)}, 16, 64, full));
  while (__atomic_load_n(waiting.word, __ATOMIC_ACQUIRE) < 16) std::this_thread::yield();
  OK(launch(copy, kernels::Copy{at(from), at(to), 64}, 1, 64, other));
  let_others_go_on();
  EXPECT(CUDA_ERROR_NOT_READY, cu().cuStreamQuery(other));
  gate.open();
  OK(cu().cuStreamSynchronize(other));
}

PART(prints_an_order) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr to = device_words(17);
  OK(cu().cuMemsetD32Async(to, 0, 17, stream));
  OK(launch(session.function("test_order"), kernels::Copy{nullptr, at(to), 0}, 1, 16, stream));
  std::string text;
  for (const std::uint32_t one : read(to, 17, stream)) text += std::to_string(one) + " ";
  std::fprintf(stderr, "%s", text.c_str());
}
TEST(the_seed_draws_the_interleaving) {
  std::set<std::string> orders;
  for (int seed = 0; seed < 6; ++seed) {
    const std::map<std::string, std::string> environment{
        {"PYCOLLECTIVE_STANDIN_SEED", std::to_string(seed)}};
    const std::string order = run_part("prints_an_order", environment);
    CHECK(order == run_part("prints_an_order", environment));
    orders.insert(order);
  }
  CHECK(orders.size() == 6);
}

TEST(a_launch_is_quick) {
  const Session session;
  const CUstream stream = new_stream();
  const CUdeviceptr from = device_words(16384), to = device_words(16384);
  const CUfunction function = session.function("test_copy");
  double best = 1e9;
  for (int i = 0; i < 50; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    OK(launch(function, kernels::Copy{at(from), at(to), 16384}, 2, 64, stream));
    OK(cu().cuStreamSynchronize(stream));
    best = std::min(
        best, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
                  .count());
  }
  if (std::getenv("TEST_SAY_TIME")) std::printf("64 KiB, 2 x 64 threads: %.3f ms\n", best);
  CHECK(best < (kThreadSanitizer ? 200 : 10));
}

TEST_MAIN
