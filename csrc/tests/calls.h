// Requests that tests make, and how they fail.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "engine/api.h"
#include "tests/check.h"

namespace pycollective::testing {

// In place; the sum.
inline Request all_reduce(std::vector<float>& x) {
  Request request;
  request.kind = OpKind::kAllReduce;
  request.dtype = Dtype::kFloat32;
  request.count = x.size();
  request.input = request.output = x.data();
  return request;
}

// A message to or from `peer`.
inline Request pair(OpKind kind, std::vector<float>& x, int peer) {
  Request request = all_reduce(x);
  request.kind = kind;
  request.root = peer;
  return request;
}

// What `act` throws, or a failure of no kind.
inline Failure failure_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const CollectiveFailure& error) {
    return error.failure();
  }
  return {};
}

// Waits until it holds, as long as a test may take.
inline void await(const std::function<bool()>& holds) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(holds());
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pycollective::testing
