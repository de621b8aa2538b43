// Collectives over GPU memory of ranks on one host that map each other's mailboxes. Kernels carry
// out execution plans by themselves (cuda/program.cu).
//
// A rank copies what others need of its input into its own slots, tells them, and reads what it
// needs in their mailboxes. Peers never map the caller's memory. Marks are written into the waiting
// rank's mailbox, so it looks at its own GPU's memory. A launch of m bytes on n ranks reads and
// writes, for each rank:
//
//              reads                             writes                             waits
//   one-shot   own m twice, (n-1) m of peers     m into its slots, m of result      1 a chunk
//   direct     own m, 2 (n-1)/n m of peers       m into its slots, m of result      2 a chunk
//   others     as their schedules say: a send is a write into the own slot, a receive a read of it
//
// and, for each chunk and block, n marks that it is done, and one for each reader and event.
//
// How the work is cut depends only on what is the same on all ranks: the request, the plan and the
// mailboxes' shape. Block b handles chunks b, b + blocks, ... of all shards, in its own slots.
//
// The user of this class makes mailboxes of one shape, of mailbox_bytes() each, clears each before
// any other rank may write to it, exchanges their addresses, and calls launch() once all ranks have
// agreed on the call. Launches of a group come in the same order on all ranks, and follow each
// other on each device, whatever their streams. The user looks at ending(), and calls abort().
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/kernels.h"
#include "cuda/program_parameters.h"
#include "engine/gpu/device_program.h"
#include "engine/plans/program.h"
#include "engine/task.h"
#include "per_process.h"

namespace pycollective {

class PeerMemory {
 public:
  using Shape = cuda::MailboxShape;

  // Enough for parts of 64 KiB of eight ranks' shards. Each block has two slots: with 17 blocks, by
  // computation the first communicator's share of an H200, a mailbox has some 18 MB.
  static constexpr std::uint64_t kUsualSlot = std::uint64_t{512} << 10;
  static std::size_t mailbox_bytes(const Shape& shape) { return cuda::mailbox_bytes(shape); }
  // Clears a mailbox, and waits for that. All its blocks begin with chunk `first_chunk`. The
  // mailbox's context is current.
  static void clear(cuda::CUdeviceptr mailbox, const Shape& shape, std::uint32_t first_chunk = 0);

  // `mailboxes`: of each member, this rank included, as mapped in this context; they outlive this.
  // `context` holds the kernels, and is made current where needed.
  // Throws std::invalid_argument, cuda::DriverError.
  PeerMemory(const cuda::Kernels& kernels, cuda::CUcontext context, Member me,
             std::vector<cuda::CUdeviceptr> mailboxes, const Shape& shape);
  // Nothing of it may be under way.
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  // Whether a plan, with these elements, fits the mailboxes; the same on all ranks.
  bool has_room(const Program& program, Dtype dtype, ReduceOp op) const;

  // Launches the task, with a plan of this group, on a stream; its buffers are in the device's
  // memory. Each wait on the device lasts at most so long. Without elements nothing is launched.
  // One thread at a time. A plan that is not uploaded yet is, which a captured stream forbids.
  // Throws std::invalid_argument for an invalid task and for one that does not fit,
  // cuda::DriverError.
  void launch(const Task& task, cuda::CUstream stream, std::uint64_t nanoseconds);
  // Whether the plan was uploaded, so that its launches may be captured.
  bool knows(const Program& program) const { return find(program) != nullptr; }
  // Uploads a plan to the device.
  void upload(const std::shared_ptr<const Program>& program);

  // Ends waits on the device, now and later, within a millisecond or two. From any thread.
  void abort();
  // Once this has returned, launches that begin on the device do nothing. From any thread. It takes
  // microseconds. If other work fills the GPU, it returns after 100 ms and takes effect later.
  void poison();
  // By member: whether it is done with this rank's launches, which have ended, and does not read or
  // write this rank's mailbox any more. Waits for a copy from the device.
  std::vector<bool> have_done();
  // Why, for which member and in which block a wait of this rank has ended badly; later launches do
  // nothing. From any thread.
  struct Ended {
    cuda::Ending why;
    Member member;
    int block;
  };
  std::optional<Ended> ending() const;

  // How a call is cut, in elements of a shard.
  struct Cut {
    std::uint64_t part;
    std::uint64_t chunks;
    unsigned blocks;
  };
  // `longest`: of the shards; `element`: its bytes; `places`: bytes of an element of all places.
  static Cut cut(std::uint64_t longest, std::size_t element, std::size_t places,
                 const Shape& shape);

 private:
  struct Uploaded {
    std::shared_ptr<const Program> program;  // keeps its address, the key, in use
    DeviceProgram lowered;
    cuda::CUdeviceptr words = 0;
  };
  struct Arena {
    cuda::CUdeviceptr device = 0;
    std::uint32_t* host = nullptr;
    std::size_t used = 0;  // words
  };
  const Uploaded* find(const Program& program) const;
  const Uploaded& put(const std::shared_ptr<const Program>& program);
  void add_arena();
  void let_go();
  std::uint32_t* word(std::size_t line) const;

  const cuda::Kernels& kernels_;
  const cuda::CUcontext context_;
  const Member me_;
  const std::vector<cuda::CUdeviceptr> mailboxes_;
  const Shape shape_;
  void* words_ = nullptr;  // pinned: the abort word, the report
  cuda::CUdeviceptr words_on_device_ = 0;
  std::uint32_t* marks_ = nullptr;  // pinned: a copy of the own mailbox's
  cuda::CUstream uploads_ = nullptr;
  std::vector<Arena> arenas_;
  std::map<const Program*, Uploaded> programs_;
  const ForkGuard guard_;
};

}  // namespace pycollective
