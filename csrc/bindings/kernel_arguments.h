// Arguments of the functions that call kernels, and how these are called.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings/array_view.h"
#include "bindings/gil.h"
#include "kernels/kernels.h"

namespace pycollective {

[[noreturn]] inline void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The level in force, or one that tests ask for.
inline SimdLevel level_named(const std::string& name) {
  if (name.empty()) return active_simd_level();
  for (const SimdLevel level : kSimdLevels)
    if (name == name_of(level) && level <= supported_simd_level()) return level;
  refuse("this CPU has no SIMD level '" + name + "'");
}

// An array of the caller's, contiguous, for as long as this lives.
class Argument {
 public:
  Argument(const pybind11::object& object, const char* name, bool written)
      : name_(name), object_(object) {
    if (!view_->open(object_.ptr(), name)) throw pybind11::error_already_set();
    if (!view_->contiguous()) refuse(name_ + " must be contiguous");
    if (written && !view_->check_writable(object_.ptr(), name)) throw pybind11::error_already_set();
  }

  const ArrayView& view() const { return *view_; }
  Dtype dtype() const { return view_->dtype(); }
  std::size_t count() const { return view_->count(); }
  template <class T>
  T* as() const {
    return static_cast<T*>(view_->data());
  }

  const Argument& of(Dtype dtype, const char* called = nullptr) const {
    if (this->dtype() != dtype)
      refuse(name_ + " must be of " + (called != nullptr ? called : name_of(dtype)) + ", not " +
             name_of(this->dtype()));
    return *this;
  }
  const Argument& of_indices() const { return of(Dtype::kInt32, "uint32 (or int32, as its bits)"); }
  const Argument& of_floats() const {
    if (dtype() == Dtype::kFloat32 || dtype() == Dtype::kFloat16 || dtype() == Dtype::kBFloat16)
      return *this;
    refuse(name_ + " must be of float32, float16 or bfloat16, not " + name_of(dtype()));
  }
  // Values that travel: NumPy alone has no bfloat16, so an int16 is one's bits.
  Dtype value_dtype() const { return dtype() == Dtype::kInt16 ? Dtype::kBFloat16 : dtype(); }
  const Argument& of_values() const { return dtype() == Dtype::kInt16 ? *this : of_floats(); }
  const Argument& long_as(const Argument& other) const {
    if (count() != other.count())
      refuse(name_ + " must have as many elements as " + other.name_ + ": " +
             std::to_string(other.count()) + ", not " + std::to_string(count()));
    return *this;
  }
  const Argument& room_for(std::uint64_t needed) const {
    if (count() < needed)
      refuse(name_ + " must have room for " + std::to_string(needed) + ", not " +
             std::to_string(count()));
    return *this;
  }
  const Argument& apart_from(const Argument& other) const {
    if (count() == 0 || other.count() == 0) return *this;
    const auto* const a = as<std::byte>();
    const auto* const b = other.as<std::byte>();
    if (a < b + other.count() * size_of(other.dtype()) && b < a + count() * size_of(dtype()))
      refuse(name_ + " must not overlap " + other.name_);
    return *this;
  }

 private:
  std::string name_;
  pybind11::object object_;
  std::unique_ptr<ArrayView> view_ = std::make_unique<ArrayView>();
};

// Runs a kernel: without Python's lock, with IEEE's defaults.
template <class Function>
auto run(Function function) {
  const GilReleased released;
  const FloatEnvironment ieee;
  return function();
}

}  // namespace pycollective
