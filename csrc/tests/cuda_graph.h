// A CUDA graph of what is put on a rank's stream. The driver's functions for it are fetched here:
// the library captures nothing itself.
#pragma once

#include <dlfcn.h>

#include "tests/cuda_ranks.h"

namespace pycollective::testing {

class Graph {
 public:
  template <class Body>
  Graph(const Rank& rank, const Body& body) : rank_(&rank) {
    const Current current(rank.device->context);
    call("cuStreamBeginCapture", 10010, rank.stream, 0);
    body();
    void* graph = nullptr;
    call("cuStreamEndCapture", 10000, rank.stream, &graph);
    call("cuGraphInstantiate", 12000, &executable_, graph, 0ULL);
    call("cuGraphDestroy", 10000, graph);
  }
  ~Graph() {
    if (executable_ == nullptr) return;
    const Current current(rank_->device->context);
    call("cuGraphExecDestroy", 10000, executable_);
  }
  Graph(Graph&& other) noexcept : rank_(other.rank_), executable_(other.executable_) {
    other.executable_ = nullptr;
  }
  Graph& operator=(Graph&&) = delete;
  void launch() const {
    const Current current(rank_->device->context);
    call("cuGraphLaunch", 10000, executable_, rank_->stream);
  }

 private:
  template <class... Parameters>
  static void call(const char* name, int version, Parameters... parameters) {
    static void* const library = dlopen(driver().library.c_str(), RTLD_NOW | RTLD_LOCAL);
    CHECK(library != nullptr);
    const auto get = reinterpret_cast<cuda::GetProcAddress>(dlsym(library, cuda::kGetProcAddress));
    void* found = nullptr;
    cuda::CUdriverProcAddressQueryResult result = cuda::CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    OK(get(name, &found, version, cuda::CU_GET_PROC_ADDRESS_LEGACY_STREAM, &result));
    CHECK(found != nullptr);
    cuda::check(reinterpret_cast<cuda::CUresult (*)(Parameters...)>(found)(parameters...), name);
  }

  const Rank* rank_;
  void* executable_ = nullptr;
};

}  // namespace pycollective::testing
