#include "cuda/image_cache.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace pycollective::cuda {
namespace {

// Ahead of the image, so that a file that was cut or damaged is seen.
struct Header {
  char magic[8];
  std::uint64_t size;
  std::uint64_t sum;
};
constexpr char kMagic[8] = {'p', 'y', 'c', 'o', 'l', 'l', '0', '1'};

std::uint64_t sum_of(const char* bytes, std::size_t size) {
  std::uint64_t sum = 0xCBF29CE484222325;
  for (std::size_t i = 0; i < size; ++i)
    sum = (sum ^ static_cast<unsigned char>(bytes[i])) * 0x100000001B3;
  return sum;
}

}  // namespace

std::string cache_folder() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/pycollective";
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home == '/') return std::string(home) + "/.cache/pycollective";
  return "";
}

std::optional<Bytes> load_cached(const std::string& name) {
  std::ifstream file(cache_folder() + "/" + name, std::ios::binary);
  if (!file) return std::nullopt;
  const Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  Header header;
  if (bytes.size() < sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const char* const image = bytes.data() + sizeof(header);
  const std::size_t size = bytes.size() - sizeof(header);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.size != size ||
      header.sum != sum_of(image, size))
    return std::nullopt;
  return Bytes(image, image + size);
}

void store_cached(const std::string& name, const Bytes& image) {
  namespace fs = std::filesystem;
  const std::string folder = cache_folder();
  std::error_code failed;
  if (folder.empty() || (fs::create_directories(folder, failed), failed)) return;
  const std::string path = folder + "/" + name;
  static std::atomic<unsigned> stores{0};  // of this process, whose threads may store at once
  const std::string made = path + "." + std::to_string(getpid()) + "." + std::to_string(++stores);
  Header header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.size = image.size();
  header.sum = sum_of(image.data(), image.size());
  std::ofstream file(made, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(&header), sizeof(header));
  file.write(image.data(), static_cast<std::streamsize>(image.size()));
  file.close();
  if (file) fs::rename(made, path, failed);
  if (!file || failed) fs::remove(made, failed);
}

}  // namespace pycollective::cuda
