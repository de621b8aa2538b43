// The plans of a communicator: made when first asked for, then kept here and nowhere else.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "engine/api.h"

namespace pycollective {

// Bytes of a rank's input or output, whichever is larger.
std::size_t whole_bytes(const Request& request, int ranks);

// Thread-safe.
class PlanCache {
 public:
  // Where plans come from. Both may need the interpreter, so they are called and let go of outside
  // the lock.
  struct Source {
    std::function<std::shared_ptr<const Program>(OpKind, const std::string& algorithm, int root)>
        make;
    // The algorithm for a request that leaves it open, of so many bytes; empty for the direct
    // paths. Where this is null, nothing is chosen: all such requests take the direct paths.
    std::function<std::string(const Request&, std::size_t bytes)> choose;
  };

  explicit PlanCache(int ranks) : ranks_(ranks) {}

  // Lets go of the source before, and of all plans.
  void set_source(Source source);
  bool chooses() const { return chooses_.load(std::memory_order_relaxed); }
  // Throws what the source does; null without one.
  std::shared_ptr<const Program> of(OpKind kind, std::string_view algorithm, int root);
  // For a request that leaves the algorithm open; null for the direct paths.
  std::shared_ptr<const Program> chosen(const Request& request);

 private:
  // What the choice may depend on: all of it is the same on every rank.
  struct Case {
    OpKind kind;
    Dtype dtype;
    int root;
    std::size_t bytes;
    bool operator==(const Case& other) const {
      return kind == other.kind && dtype == other.dtype && root == other.root &&
             bytes == other.bytes;
    }
  };
  struct Hash {
    std::size_t operator()(const Case& each) const;
  };

  const int ranks_;
  std::atomic<bool> chooses_{false};
  std::mutex mutex_;
  std::shared_ptr<const Source> source_;
  std::map<std::tuple<OpKind, int, std::string>, std::shared_ptr<const Program>, std::less<>> made_;
  std::unordered_map<Case, std::shared_ptr<const Program>, Hash> chosen_;
};

}  // namespace pycollective
