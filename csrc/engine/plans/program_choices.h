// The programs of requests that leave the algorithm open: asked for once a case, then kept.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "engine/api.h"

namespace pycollective {

// Bytes of a rank's input or output, whichever is larger.
std::size_t whole_bytes(const Request& request, int ranks);

// Thread-safe.
class ProgramChoices {
 public:
  // The program for a request of so many bytes; none for the direct paths. May need the
  // interpreter, so it is called and let go of outside the lock.
  using Source = std::function<std::shared_ptr<const Program>(const Request&, std::size_t bytes)>;

  explicit ProgramChoices(int ranks) : ranks_(ranks) {}

  // An empty one lets go of the one before.
  void set_source(Source source);
  // Without a source nothing is chosen: every request takes the direct paths.
  bool has_source() const { return has_source_.load(std::memory_order_relaxed); }
  std::shared_ptr<const Program> find(const Request& request);

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
  std::atomic<bool> has_source_{false};
  std::mutex mutex_;
  std::shared_ptr<const Source> source_;
  std::unordered_map<Case, std::shared_ptr<const Program>, Hash> known_;
};

}  // namespace pycollective
