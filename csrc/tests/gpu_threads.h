// Communicators whose ranks are threads, each with a GPU: so peers map each other by plain
// pointers.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/gpu/device_group.h"
#include "kernels/kernels.h"
#include "tests/check.h"
#include "tests/cuda_streams.h"
#include "tests/device_programs.h"
#include "tests/number_inputs.h"
#include "tests/thread_ranks.h"

namespace pycollective::testing {

// The stream of a GPU's that no kernel is ever put on, the same for all threads. Its context is
// current. A GPU has 32 queues at most, and streams that share one may wait for each other: so
// tests make few.
inline CUstream stream_beside(int device) {
  static std::mutex mutex;
  static std::map<int, CUstream> streams;
  const std::lock_guard lock(mutex);
  CUstream& stream = streams[device];
  if (stream == nullptr) OK(driver().cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING));
  return stream;
}

// Floats in a GPU's memory, and a stream of their own, once it is asked for.
class Array {
 public:
  Array(int device, std::size_t count) : gpu_(cuda::Gpu::at(device)), bytes_(4 * count) {
    const Current current(gpu_.context());
    beside_ = stream_beside(device);
    OK(driver().cuMemAlloc(&memory_, bytes_));
    OK(driver().cuMemsetD32Async(memory_, 0xA5A5A5A5, count, beside_));
    OK(driver().cuStreamSynchronize(beside_));
  }
  ~Array() {
    CHECK(stream_ == nullptr || idle_in(kLongest));
    const Current current(gpu_.context());
    if (stream_ != nullptr) OK(driver().cuStreamDestroy(stream_));
    OK(driver().cuMemFree(memory_));
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  int device() const { return gpu_.traits().ordinal; }
  CUstream stream() const {
    std::call_once(made_, [this] {
      const Current current(gpu_.context());
      OK(driver().cuStreamCreate(&stream_, cuda::CU_STREAM_NON_BLOCKING));
    });
    return stream_;
  }
  void* data() const { return reinterpret_cast<void*>(memory_); }
  std::size_t count() const { return bytes_ / 4; }

  // While nothing on a stream uses them.
  void write(const Data& data) const {
    const Current current(gpu_.context());
    CHECK(data.size() == bytes_);
    OK(driver().cuMemcpyAsync(memory_, reinterpret_cast<CUdeviceptr>(data.data()), bytes_,
                              beside_));
    OK(driver().cuStreamSynchronize(beside_));
  }
  // In the stream's order.
  Data read() const { return read(stream()); }
  // What is there at this moment, whatever the stream has still to do.
  Data look() const { return read(beside_); }
  bool idle() const {
    const Current current(gpu_.context());
    return is_idle(stream());
  }
  bool idle_in(double seconds) const {
    const Current current(gpu_.context());
    return is_idle_in(stream(), seconds);
  }

 private:
  Data read(CUstream stream) const {
    const Current current(gpu_.context());
    Data data(bytes_);
    OK(driver().cuMemcpyAsync(reinterpret_cast<CUdeviceptr>(data.data()), memory_, bytes_, stream));
    OK(driver().cuStreamSynchronize(stream));
    return data;
  }

  cuda::Gpu& gpu_;
  const std::size_t bytes_;
  mutable std::once_flag made_;
  mutable CUstream stream_ = nullptr;
  CUstream beside_ = nullptr;
  CUdeviceptr memory_ = 0;
};

inline std::shared_ptr<DeviceMailbox> make_mailbox(int device) {
  DeviceGroup::make_room(device);
  return std::make_shared<DeviceMailbox>(device, std::vector<std::string>());
}

// Keeps the array's stream busy until it is let go: by a kernel that waits for a peer that never
// comes.
class Busy {
 public:
  explicit Busy(const Array& array)
      : array_(array),
        own_(make_mailbox(array.device())),
        absent_(make_mailbox(array.device())),
        dummy_(array.device(), 1),
        peers_(*own_->kernels(), own_->gpu().context(), Member(0),
               {own_->address(), absent_->address()}, own_->card().shape) {
    Request request;
    request.kind = OpKind::kAllReduce;
    request.dtype = Dtype::kFloat32;
    request.count = 1;
    request.input = request.output = dummy_.data();
    request.program = one_shot(2)[0];
    peers_.launch(Task(request), array.stream(), static_cast<std::uint64_t>(kLongest * 1e9));
    CHECK(!array.idle());
  }
  ~Busy() {
    let_go();
    CHECK(array_.idle_in(kLongest));
  }
  void let_go() { peers_.abort(); }

 private:
  const Array& array_;
  const std::shared_ptr<DeviceMailbox> own_, absent_;
  Array dummy_;
  PeerMemory peers_;
};

// Ranks on a GPU each, as far as there are as many.
class GpuThreads : public ThreadRanks {
 public:
  enum class Way { kKernels, kHost };

  explicit GpuThreads(int ranks, Way way = Way::kKernels)
      : ThreadRanks(ranks), group_(make_group()) {
    if (way == Way::kKernels) set_devices(group_);
  }
  // Another communicator of the same ranks, by kernels.
  std::vector<std::shared_ptr<Communicator>> another() {
    auto made = make_group();
    set_devices(made);
    return made;
  }
  static int device(int rank) { return rank % driver().devices; }
  // So many ranks, or as many as GPUs have blocks for: of one H200 for six.
  static int that_fit(int ranks) {
    std::vector<std::shared_ptr<DeviceMailbox>> own;
    for (int r = 0; r < ranks; ++r) {
      DeviceGroup::make_room(device(r));
      if (!BlockShare::is_left(device(r))) return r;
      own.push_back(make_mailbox(device(r)));
    }
    return ranks;
  }
  Communicator& at(int rank) { return *group_[static_cast<std::size_t>(rank)]; }

 private:
  void set_devices(const std::vector<std::shared_ptr<Communicator>>& group) {
    std::vector<std::shared_ptr<DeviceMailbox>> own;
    std::vector<DeviceCard> cards;
    for (int r = 0; r < size(); ++r) {
      own.push_back(make_mailbox(device(r)));
      cards.push_back(own.back()->card());
    }
    for (int r = 0; r < size(); ++r) {
      const auto rank = static_cast<std::size_t>(r);
      auto device = std::make_shared<DeviceGroup>(own[rank], Member(r), cards);
      device->set_source([rank, ranks = size()](OpKind kind, int) {
        return programs_of("direct", kind, ranks)[rank];
      });
      group[rank]->set_device(std::move(device));
    }
  }

  std::vector<std::shared_ptr<Communicator>> group_;
};

// On the output's stream, unless another is named.
inline Request all_reduce(const Array& from, const Array& to, bool ends,
                          CUstream stream = nullptr) {
  CHECK(from.device() == to.device() && from.count() == to.count());
  Request request;
  request.kind = OpKind::kAllReduce;
  request.dtype = Dtype::kFloat32;
  request.count = from.count();
  request.input = from.data();
  request.output = to.data();
  request.location = {to.device(), stream != nullptr ? stream : to.stream(), ends};
  return request;
}

// Of all ranks in one turn, and their sum by the CPU's kernels.
struct Turn {
  Turn(int ranks, std::size_t count, unsigned seed) : sum(4 * count) {
    Random random(seed);
    std::vector<const void*> leaves;
    for (int r = 0; r < ranks; ++r) {
      inputs.emplace_back(4 * count);
      for (std::size_t i = 0; i < count; ++i)
        write_element(traits_of(Dtype::kFloat32), inputs.back().data() + 4 * i, random);
    }
    for (const Data& input : inputs) leaves.push_back(input.data());
    const FloatEnvironment ieee;
    find_kernels(Dtype::kFloat32, ReduceOp::kSum, active_simd_level())
        .reduce(leaves.data(), ranks, ranks, sum.data(), nullptr, count);
  }
  const Data& of(int rank) const { return inputs[static_cast<std::size_t>(rank)]; }

  std::vector<Data> inputs;
  Data sum;
};

}  // namespace pycollective::testing
