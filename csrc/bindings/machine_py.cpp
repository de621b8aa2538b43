// What the machine allows, and what calls take without Python: for the benchmarks.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "bindings/gil.h"
#include "engine/api.h"
#include "engine/waiting_time.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// A limit of memory must not be one of the compiler's baseline instruction set.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx2", "default")))
#endif
void increment(std::uint8_t* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(bytes[i] + 1);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Two cells that never share a cache line, nor the line that a prefetcher fetches beside it.
struct alignas(128) Flag {
  std::atomic<long> value{0};
};

// Spins until `flag` reaches `target`. The other side is a thread of this process that is running
// a bounded loop, so this ends; it yields in case something else has taken the other core.
void wait_for(const Flag& flag, long target) {
  for (long polls = 1; flag.value.load(std::memory_order_acquire) < target; ++polls)
    if (polls % 100000 == 0) sched_yield();
}

int pin_this_thread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Runs body(0) and body(1) on their own cores at once and returns the longer of their times.
double run_pinned(int cpu_a, int cpu_b, const std::function<double(int)>& body) {
  const int cpus[2] = {cpu_a, cpu_b};
  double seconds[2] = {0, 0};
  int errors[2] = {0, 0};
  Flag pinned[2];
  auto run = [&](int side) {
    errors[side] = pin_this_thread(cpus[side]);
    pinned[side].value.store(1, std::memory_order_release);
    wait_for(pinned[1 - side], 1);
    if (errors[0] == 0 && errors[1] == 0) seconds[side] = body(side);
  };
  std::thread first(run, 0);
  std::thread second(run, 1);
  first.join();
  second.join();
  for (int side = 0; side < 2; ++side)
    if (errors[side] != 0)
      throw std::system_error(errors[side], std::generic_category(),
                              "cannot pin a thread to CPU " + std::to_string(cpus[side]));
  return std::max(seconds[0], seconds[1]);
}

// Half a round trip of a flag in a cache line that two cores share.
double core_to_core_latency(int cpu_a, int cpu_b, int round_trips) {
  Flag flag;
  const double seconds = run_pinned(cpu_a, cpu_b, [&](int side) {
    const auto start = Clock::now();
    for (long trip = 0; trip < round_trips; ++trip) {
      // Side 0 turns 2t into 2t + 1, side 1 turns that into 2t + 2.
      wait_for(flag, 2 * trip + side);
      flag.value.store(2 * trip + side + 1, std::memory_order_release);
    }
    return seconds_since(start);
  });
  return seconds / (2.0 * round_trips);
}

// `chunk` is small enough to be still in the writer's cache. Neither writing nor waiting for each
// other counts, so no transport can do better.
double core_to_core_copy(int cpu_a, int cpu_b, std::size_t total, std::size_t chunk) {
  Flag written[2];
  Flag copied[2];
  std::vector<char> shared[2] = {std::vector<char>(chunk), std::vector<char>(chunk)};
  const long rounds = static_cast<long>((total + chunk - 1) / chunk);
  return run_pinned(cpu_a, cpu_b, [&](int side) {
    std::vector<char> own(chunk);
    double seconds = 0;
    for (long round = 0; round < rounds; ++round) {
      std::memset(shared[side].data(), static_cast<int>(round), chunk);
      written[side].value.store(round + 1, std::memory_order_release);
      wait_for(written[1 - side], round + 1);
      const std::size_t left = total - static_cast<std::size_t>(round) * chunk;
      const auto start = Clock::now();
      std::memcpy(own.data(), shared[1 - side].data(), std::min(chunk, left));
      seconds += seconds_since(start);
      // The other side may write its next chunk only once this one has been read.
      copied[side].value.store(round + 1, std::memory_order_release);
      wait_for(copied[1 - side], round + 1);
    }
    return seconds;
  });
}

template <class Table>
const auto& row_named(const Table& table, const std::string& name, const char* what) {
  if (const auto* found = find_named(table, name)) return *found;
  throw std::invalid_argument("unknown " + std::string(what) + " " + name);
}

py::buffer_info writable_bytes(const py::buffer& buffer) {
  py::buffer_info info = buffer.request(true);
  if (info.itemsize != 1 || info.ndim != 1 || (info.size > 0 && info.strides[0] != 1))
    throw std::invalid_argument("the buffer must be one-dimensional contiguous bytes");
  return info;
}

double stream_in_place(const py::buffer& buffer, int repetitions) {
  const py::buffer_info info = writable_bytes(buffer);
  const GilReleased unlocked;
  const auto start = Clock::now();
  for (int repetition = 0; repetition < repetitions; ++repetition)
    increment(static_cast<std::uint8_t*>(info.ptr), static_cast<std::size_t>(info.size));
  return seconds_since(start);
}

double time_collective(const py::capsule& capsule, const std::string& kind,
                       const std::string& dtype, const std::string& reduce_op, int root,
                       const py::buffer& input, const py::buffer& output, std::size_t count,
                       int repetitions) {
  if (std::string(kCapsuleName) != (capsule.name() != nullptr ? capsule.name() : ""))
    throw std::invalid_argument("not the capsule of a communicator");
  const std::shared_ptr<Collectives> collectives =
      *capsule.get_pointer<std::shared_ptr<Collectives>>();
  const py::buffer_info from = writable_bytes(input);
  const py::buffer_info to = writable_bytes(output);
  Request request;
  request.kind = row_named(kOperationTable, kind, "operation").kind;
  request.dtype = row_named(kDtypeTable, dtype, "dtype").dtype;
  request.reduce_op = row_named(kReduceOpTable, reduce_op, "reduce operation").op;
  request.root = root;
  request.input = from.ptr;
  request.output = to.ptr;
  request.count = count;
  const InterruptHook interrupted;
  const GilReleased unlocked;
  const auto start = Clock::now();
  for (int repetition = 0; repetition < repetitions; ++repetition)
    collectives->run(request, interrupted);
  return seconds_since(start);
}

}  // namespace

void bind_machine(py::module_& module) {
  module.def("stream_in_place", &stream_in_place, py::arg("buffer"), py::arg("repetitions"),
             "Add one to every byte of `buffer` (1-D uint8), `repetitions` times; seconds.");
  module.def("core_to_core_latency", &core_to_core_latency, py::arg("cpu_a"), py::arg("cpu_b"),
             py::arg("round_trips"), py::call_guard<GilReleased>(),
             "One-way latency between two cores, in seconds.");
  module.def("core_to_core_copy", &core_to_core_copy, py::arg("cpu_a"), py::arg("cpu_b"),
             py::arg("total"), py::arg("chunk"), py::call_guard<GilReleased>(),
             "Seconds for each of two cores to copy `total` bytes that the other has just written, "
             "both at once, `chunk` bytes at a time; only the copying counts.");
  module.def("time_collective", &time_collective, py::arg("capsule"), py::arg("kind"),
             py::arg("dtype"), py::arg("reduce_op"), py::arg("root"), py::arg("input"),
             py::arg("output"), py::arg("count"), py::arg("repetitions"),
             "Seconds for `repetitions` synchronous calls of one operation, with no Python between "
             "them. Buffers are 1-D uint8; `count` is as in csrc/engine/api.h.");
}

}  // namespace pycollective
