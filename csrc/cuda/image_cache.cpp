#include "cuda/image_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

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

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

bool is_own(const struct stat& found) {
  return found.st_uid == geteuid() && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// Moves all of them by read or write, which may move fewer.
template <class Move, class Byte>
bool move_all(Move move, int descriptor, Byte* bytes, std::size_t size) {
  while (size > 0) {
    const ssize_t moved = move(descriptor, bytes, size);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    bytes += moved;
    size -= static_cast<std::size_t>(moved);
  }
  return true;
}

// The folder and those above it, as far as they are not there. mkdir's failure shows in the end.
void make_folders(const std::string& path) {
  for (std::size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    mkdir(path.substr(0, end).c_str(), S_IRWXU);
    if (end == std::string::npos) return;
  }
}

}  // namespace

std::string cache_folder() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache == '/') return std::string(cache) + "/pycollective";
  const char* const home = std::getenv("HOME");
  if (home != nullptr && *home == '/') return std::string(home) + "/.cache/pycollective";
  return "";
}

std::string cache_refusal() {
  const std::string folder = cache_folder();
  if (folder.empty()) return "neither XDG_CACHE_HOME nor HOME names a folder";
  struct stat found;
  if (lstat(folder.c_str(), &found) != 0)
    return errno == ENOENT ? "" : folder + ": " + std::strerror(errno);
  if (!S_ISDIR(found.st_mode)) return folder + " is not a folder";
  if (found.st_uid != geteuid())
    return folder + " is user " + std::to_string(found.st_uid) + "'s, not " +
           std::to_string(geteuid()) + "'s";
  if (!is_own(found)) return folder + " can be written by others; chmod 700 it";
  return "";
}

std::optional<Bytes> load_cached(const std::string& name) {
  if (!cache_refusal().empty()) return std::nullopt;
  const std::string path = cache_folder() + "/" + name;
  // A pipe of that name is not waited for.
  const File file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat found;
  if (file.descriptor() < 0 || fstat(file.descriptor(), &found) != 0) return std::nullopt;
  if (!S_ISREG(found.st_mode) || !is_own(found)) return std::nullopt;
  Header header;
  const auto size = static_cast<std::size_t>(found.st_size);
  if (size < sizeof(header) ||
      !move_all(read, file.descriptor(), reinterpret_cast<char*>(&header), sizeof(header)) ||
      std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 ||
      header.size != size - sizeof(header))
    return std::nullopt;
  Bytes image(header.size);
  if (!move_all(read, file.descriptor(), image.data(), image.size()) ||
      header.sum != sum_of(image.data(), image.size()))
    return std::nullopt;
  return image;
}

void store_cached(const std::string& name, const Bytes& image) {
  const std::string folder = cache_folder();
  if (folder.empty()) return;
  make_folders(folder);
  if (!cache_refusal().empty()) return;
  const std::string path = folder + "/" + name;
  std::string made = path + ".XXXXXX";
  Header header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.size = image.size();
  header.sum = sum_of(image.data(), image.size());
  bool whole = false;
  {
    const File file(mkostemp(made.data(), O_CLOEXEC));
    if (file.descriptor() < 0) return;
    whole = move_all(write, file.descriptor(), reinterpret_cast<const char*>(&header),
                     sizeof(header)) &&
            move_all(write, file.descriptor(), image.data(), image.size());
  }
  if (!whole || std::rename(made.c_str(), path.c_str()) != 0) unlink(made.c_str());
}

}  // namespace pycollective::cuda
