// The part of the DLPack ABI that an import needs: version 1.x, and 0.x, whose capsules
// hold a tensor without a version. The field order and values are the standard's.
#pragma once

#include <cstdint>

namespace pycollective::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // elements; null: C-contiguous
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;  // another one: nothing behind `deleter` may be looked at
  std::uint32_t minor;
};

enum Flag : std::uint64_t { kReadOnly = 1, kIsCopied = 2 };

struct VersionedTensor {
  Version version;
  void* manager;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

}  // namespace pycollective::dlpack
