// Memory: one reservation of addresses, the lower half never touchable, the upper half the same
// pages for kernels and copies; and the host's memory that was pinned.
//
// Compiled without TSan, its lock made of bare atomics: a lock that TSan saw would order kernels
// that ask where their pointers lie, and hide races between them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "exports.h"

namespace standin {

struct Context;

enum class Kind {
  kPageable,   // the host's, as far as the driver knows
  kDevice,     // device memory, own or of another process
  kMapped,     // the number by which a device knows pinned memory
  kPinned,     // the host's own address of pinned memory
  kForbidden,  // where kernels see device memory: no address for a program
};

// What an address is part of, and where kernels and copies find it.
struct Place {
  Kind kind;
  Context* context;     // that owns it; null for pageable
  std::uint64_t start;  // of the allocation, in the same numbers
  std::size_t bytes;    // of the allocation
  char* seen;           // the address itself, as kernels and copies see it
  // All of so many bytes, from the address on, lie in it.
  bool holds(std::uint64_t address, std::size_t length) const {
    return kind == Kind::kPageable ||
           (address - start <= bytes && length <= bytes - (address - start));
  }
};

bool reserve_addresses();
// The constant distance between device memory and where kernels see it.
std::uint64_t emulation_offset();
Place find_place(std::uint64_t address);

CUresult allocate(Context& context, std::size_t bytes, CUdeviceptr* address);
// Where another process maps it, its context fails.
CUresult release(CUdeviceptr address);
std::size_t allocated_bytes(int device);

// The descriptor that all device memory of this process is part of, and where in it.
struct Exported {
  int descriptor;
  std::uint64_t offset, bytes, nonce;
};
CUresult export_memory(CUdeviceptr address, Exported* exported);
// `descriptor` is of the exporting process's memory. The nonce tells whether it is still there.
CUresult import_memory(Context& context, int descriptor, const Exported& exported,
                       CUdeviceptr* address);
// Closes once what was imported; the last time unmaps it.
CUresult close_import(Context& context, CUdeviceptr address);

CUresult host_allocate(Context& context, std::size_t bytes, void** address);
CUresult host_free(void* address);

// A child holds nothing of what its parent has imported, which else would outlive the parent.
void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

}  // namespace standin
