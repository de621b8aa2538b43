#include "mpi/link.h"

#include <algorithm>
#include <climits>
#include <functional>
#include <stdexcept>
#include <utility>

namespace pycollective {
namespace {

constexpr int kMpiSuccess = 0;  // of every MPI

template <class Handle>
Handle as_handle(std::uint64_t value) {
  if constexpr (std::is_pointer_v<Handle>)
    return reinterpret_cast<Handle>(static_cast<std::uintptr_t>(value));
  else
    return static_cast<Handle>(value);
}

template <class Handle>
class MpiLink final : public Link {
 public:
  MpiLink(const MpiConstants& constants, std::uint64_t comm, std::vector<int> ranks,
          bool frees_unused)
      : mpi_(load_mpi<Handle>(constants.library)),
        comm_(as_handle<Handle>(comm)),
        byte_(as_handle<Handle>(constants.byte)),
        any_source_(constants.any_source),
        status_bytes_(constants.status_bytes),
        ranks_(std::move(ranks)),
        frees_unused_(frees_unused) {}

  ~MpiLink() override {
    if (frees_unused_ && !used_) close(true);
  }

  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool) override {
    Handle request;
    check(mpi_.isend(data, length(bytes), byte_, at(rank), lane, comm_, &request), "MPI_Isend");
    return begun(request, false);
  }

  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override {
    Handle request;
    const int source = rank == kAnyRank ? any_source_ : at(rank);
    check(mpi_.irecv(data, length(capacity), byte_, source, lane, comm_, &request), "MPI_Irecv");
    return begun(request, true);
  }

  void progress() override {
    if (requests_.empty()) return;
    int done = 0;
    check(mpi_.testsome(static_cast<int>(requests_.size()), requests_.data(), &done,
                        completed_.data(), statuses_.data()),
          "MPI_Testsome");
    if (done <= 0) return;  // or MPI_UNDEFINED
    for (int i = 0; i < done; ++i) {
      Slot& slot = slots_[owners_[static_cast<std::size_t>(completed_[i])]];
      slot.outcome = Outcome::kDone;
      int cancelled = 0;
      if (slot.cancelled) {
        const std::byte* status = statuses_.data() + static_cast<std::size_t>(i) * status_bytes_;
        check(mpi_.test_cancelled(status, &cancelled), "MPI_Test_cancelled");
      }
      if (cancelled) slot.outcome = Outcome::kCancelled;
    }
    // From the last on, so that what moves into a gap is not itself done.
    std::sort(completed_.begin(), completed_.begin() + done, std::greater<>());
    for (int i = 0; i < done; ++i) {
      const auto gap = static_cast<std::size_t>(completed_[i]);
      requests_[gap] = requests_.back();
      owners_[gap] = owners_.back();
      slots_[owners_[gap]].request = gap;
      requests_.pop_back();
      owners_.pop_back();
    }
  }

  Outcome test(Transfer transfer) override {
    Slot& slot = slots_[index(transfer)];
    if (slot.outcome == Outcome::kUnderWay) return Outcome::kUnderWay;
    ++slot.uses;
    free_.push_back(index(transfer));
    return slot.outcome;
  }

  void cancel(Transfer transfer) noexcept override {
    Slot& slot = slots_[index(transfer)];
    if (!slot.receives || slot.cancelled || slot.outcome != Outcome::kUnderWay) return;
    slot.cancelled = mpi_.cancel(&requests_[slot.request]) == kMpiSuccess;
  }

  std::optional<Loss> lost() override { return std::nullopt; }  // MPI ends the job instead
  bool ring_with(std::function<void()>) override {
    used_ = true;
    return false;
  }

  bool must_be_quiet() const override { return true; }

  void close(bool quiet) noexcept override {
    int finalized = 0;
    if (std::exchange(closed_, true) || mpi_.finalized(&finalized) != kMpiSuccess || finalized)
      return;
    // MPI gives the number of a freed communicator to the next. Where messages may still be on
    // their way to this rank, it is left to the end of the process.
    if (quiet && requests_.empty()) mpi_.comm_free(&comm_);
  }

 private:
  struct Slot {
    std::size_t request = 0;  // place of the request, while it is under way
    Outcome outcome = Outcome::kUnderWay;
    bool receives = false;
    bool cancelled = false;
    std::uint32_t uses = 0;  // how often it has been used before: no transfer has a former's number
  };

  static std::size_t index(Transfer transfer) { return (transfer & 0xffffffff) - 1; }
  int at(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
  static int length(std::size_t bytes) {
    if (bytes > INT_MAX) throw std::runtime_error("a message of more than 2 GiB");
    return static_cast<int>(bytes);
  }

  void check(int error, const char* call) const {
    if (error == kMpiSuccess) return;
    char text[1024] = "";  // more than MPI_MAX_ERROR_STRING of any MPI
    int size = 0;
    mpi_.error_string(error, text, &size);
    throw std::runtime_error(std::string(call) + ": " + text);
  }

  Transfer begun(Handle request, bool receives) {
    if (free_.empty()) {
      free_.push_back(slots_.size());
      slots_.emplace_back();
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = {requests_.size(), Outcome::kUnderWay, receives, false, slots_[slot].uses};
    requests_.push_back(request);
    owners_.push_back(slot);
    if (completed_.size() < requests_.size()) {
      completed_.resize(2 * requests_.size());
      statuses_.resize(completed_.size() * status_bytes_);
    }
    return Transfer{slots_[slot].uses} << 32 | (slot + 1);
  }

  const MpiFunctions<Handle> mpi_;
  Handle comm_;
  const Handle byte_;
  const int any_source_;
  const std::size_t status_bytes_;
  const std::vector<int> ranks_;
  std::vector<Handle> requests_;     // under way
  std::vector<std::size_t> owners_;  // the slot of each
  std::vector<Slot> slots_;          // by transfer
  std::vector<std::size_t> free_;    // slots
  std::vector<int> completed_;
  std::vector<std::byte> statuses_;
  const bool frees_unused_;
  bool used_ = false;
  bool closed_ = false;
};

}  // namespace

std::shared_ptr<Link> make_mpi_link(const MpiConstants& constants, std::uint64_t comm,
                                    std::vector<int> ranks, bool frees_unused) {
  switch (constants.handle_bytes) {
    case sizeof(int):
      return std::make_shared<MpiLink<int>>(constants, comm, std::move(ranks), frees_unused);
    case sizeof(void*):
      return std::make_shared<MpiLink<void*>>(constants, comm, std::move(ranks), frees_unused);
    default:
      throw std::runtime_error("MPI's handles are neither ints nor pointers");
  }
}

}  // namespace pycollective
