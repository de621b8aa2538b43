// Handles that are numbers, never addresses, and that no second object gets: a stale or a made-up
// one is found out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace standin {

template <class Handle, class Object>
class Handles {
 public:
  // `tag` sets apart the kinds; no handle is below 4096.
  explicit Handles(std::uint64_t tag) : next_(tag << 40) {}

  Handle add(std::shared_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t number = next_ += 16;
    objects_.emplace(number, std::move(object));
    return reinterpret_cast<Handle>(number);
  }
  std::shared_ptr<Object> find(Handle handle) const {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uint64_t>(handle));
    return found == objects_.end() ? nullptr : found->second;
  }
  // The object that the handle named, or none where it named none.
  std::shared_ptr<Object> remove(Handle handle) {
    const std::lock_guard lock(mutex_);
    const auto found = objects_.find(reinterpret_cast<std::uint64_t>(handle));
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  mutable std::mutex mutex_;
  std::uint64_t next_;
  std::map<std::uint64_t, std::shared_ptr<Object>> objects_;
};

}  // namespace standin
