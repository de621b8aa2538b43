#include "settings.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>

namespace standin {
namespace {

long long number(const char* name, long long otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtoll(text, nullptr, 0) : otherwise;
}

Settings read() {
  Settings read{};
  const int count = static_cast<int>(
      std::clamp(number("PYCOLLECTIVE_STANDIN_DEVICES", 2), 0ll, 64ll));  // Context::peers has 64
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible) {  // numbers alone; as in the driver, the first that is none ends the list
    std::istringstream list(visible);
    for (std::string item; std::getline(list, item, ',');) {
      char* end = nullptr;
      const long device = std::strtol(item.c_str(), &end, 10);
      if (end == item.c_str() || device < 0 || device >= count) break;
      read.devices.push_back(static_cast<int>(device));
    }
  } else {
    for (int device = 0; device < count; ++device) read.devices.push_back(device);
  }
  read.peers = number("PYCOLLECTIVE_STANDIN_PEERS", 1) != 0;
  // An H200 has 132; on four, little room is soon tested.
  read.multiprocessors = static_cast<unsigned>(
      std::clamp(number("PYCOLLECTIVE_STANDIN_MULTIPROCESSORS", 4), 1ll, 132ll));
  read.version = static_cast<int>(number("PYCOLLECTIVE_STANDIN_VERSION", kVersion));
  read.exploring = number("PYCOLLECTIVE_STANDIN_SEED", -1) >= 0;
  read.seed =
      read.exploring ? static_cast<std::uint64_t>(number("PYCOLLECTIVE_STANDIN_SEED", 0)) : 0;
  return read;
}

}  // namespace

const Settings& settings() {
  static const Settings* const kept = new Settings(read());
  return *kept;
}

}  // namespace standin
