// What the environment says of the devices that are played, and how draws are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace standin {

constexpr int kVersion = 13000;
constexpr unsigned kThreadsOfMultiprocessor = 256;
constexpr unsigned kBlocksOfMultiprocessor = 8;
constexpr unsigned kThreadsOfBlock = 64;
constexpr std::size_t kBytesOfDevice = std::size_t{4} << 30;

struct Settings {
  std::vector<int> devices;  // by ordinal, the device's own number (CUDA_VISIBLE_DEVICES)
  bool peers;                // devices can map each other (PYCOLLECTIVE_STANDIN_PEERS)
  unsigned multiprocessors;  // of each (PYCOLLECTIVE_STANDIN_MULTIPROCESSORS)
  int version;               // of the driver (PYCOLLECTIVE_STANDIN_VERSION)
  std::uint64_t seed;        // PYCOLLECTIVE_STANDIN_SEED
  bool exploring;            // a seed was given: also delay streams, and give way more often
};

// Read once.
const Settings& settings();

// splitmix64 (Steele, Lea, Flood 2014). Inlined always: fibers draw, whom TSan takes for threads.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  [[gnu::always_inline]] std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  [[gnu::always_inline]] std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

}  // namespace standin
