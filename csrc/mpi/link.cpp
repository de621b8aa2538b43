#include "mpi/link.h"

#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <deque>
#include <functional>
#include <stdexcept>
#include <utility>

namespace pycollective {
namespace {

// The functions of MPI that messages need.
template <class Handle>
struct MpiFunctions {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*testsome)(int, Handle*, int*, int*, void*);
  int (*cancel)(Handle*);
  int (*test_cancelled)(const void*, int*);
  int (*comm_free)(Handle*);
  int (*finalized)(int*);
  int (*error_class)(int, int*);
  int (*error_string)(int, char*, int*);
};

// Throws std::runtime_error where the library is not loaded, or lacks one.
template <class Handle>
MpiFunctions<Handle> load_mpi(const std::string& library) {
  // Only what is loaded: another copy of MPI would know nothing of this job. It stays loaded.
  void* const loaded = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) throw std::runtime_error(library + " is not loaded");
  const auto find = [&](const char* name, auto& function) {
    void* const found = dlsym(loaded, name);
    if (found == nullptr) throw std::runtime_error(library + " has no " + name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  MpiFunctions<Handle> mpi{};
  find("MPI_Isend", mpi.isend);
  find("MPI_Irecv", mpi.irecv);
  find("MPI_Testsome", mpi.testsome);
  find("MPI_Cancel", mpi.cancel);
  find("MPI_Test_cancelled", mpi.test_cancelled);
  find("MPI_Comm_free", mpi.comm_free);
  find("MPI_Finalized", mpi.finalized);
  find("MPI_Error_class", mpi.error_class);
  find("MPI_Error_string", mpi.error_string);
  return mpi;
}

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
        is_(constants),
        comm_(as_handle<Handle>(comm)),
        byte_(as_handle<Handle>(constants.byte)),
        null_(as_handle<Handle>(constants.null_request)),
        ranks_(std::move(ranks)),
        frees_unused_(frees_unused) {}

  ~MpiLink() override {
    if (frees_unused_ && !used_) close(true);
  }

  Transfer send(int rank, int lane, const void* data, std::size_t bytes, bool) override {
    Handle request;
    const int error = mpi_.isend(data, length(bytes), byte_, at(rank), lane, comm_, &request);
    return begun(error, "MPI_Isend", request, rank, false);
  }

  Transfer receive(int rank, int lane, void* data, std::size_t capacity) override {
    Handle request;
    const int source = rank == kAnyRank ? is_.any_source : at(rank);
    const int error = mpi_.irecv(data, length(capacity), byte_, source, lane, comm_, &request);
    return begun(error, "MPI_Irecv", request, rank, true);
  }

  void progress() override {
    if (requests_.empty()) return;
    int done = 0;
    const int error = mpi_.testsome(static_cast<int>(requests_.size()), requests_.data(), &done,
                                    completed_.data(), statuses_.data());
    // Then each that is told of has an error of its own in its status, or none.
    const bool in_status = error != kMpiSuccess && class_of(error) == is_.in_status;
    if (!in_status) check(error, "MPI_Testsome");
    int ended = 0;
    int own = kMpiSuccess;            // an error that is no loss of a rank
    for (int i = 0; i < done; ++i) {  // none where it is MPI_UNDEFINED
      const std::byte* status = statuses_.data() + static_cast<std::size_t>(i) * is_.status_bytes;
      Slot& slot = slots_[owners_[static_cast<std::size_t>(completed_[i])]];
      const int error = in_status ? error_in(status) : kMpiSuccess;
      if (!end(slot, status, error)) continue;
      if (error != kMpiSuccess && class_of(error) != is_.proc_failed) own = error;
      completed_[ended++] = completed_[i];
    }
    // From the last on, so that what moves into a gap is not itself done.
    std::sort(completed_.begin(), completed_.begin() + ended, std::greater<>());
    for (int i = 0; i < ended; ++i) remove(static_cast<std::size_t>(completed_[i]));
    // Open MPI 5 does not tell of a message that fails beside a receive that is pending.
    for (std::size_t i = in_status ? requests_.size() : 0; i-- > 0;) {
      if (requests_[i] != null_) continue;
      lose(slots_[owners_[i]], text_of(is_.proc_failed));
      remove(i);
    }
    check(own, "MPI_Testsome");
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

  // Mostly MPI ends the job instead.
  std::optional<Loss> lost() override {
    if (losses_.empty()) return std::nullopt;
    Loss loss = std::move(losses_.front());
    losses_.pop_front();
    return loss;
  }
  bool wake_with(std::function<void()>) override {
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
    int rank = 0;  // of the other side, or kAnyRank
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
    if (error != kMpiSuccess) throw std::runtime_error(std::string(call) + ": " + text_of(error));
  }

  std::string text_of(int error) const {
    char text[1024] = "";  // more than MPI_MAX_ERROR_STRING of any MPI
    int size = 0;
    mpi_.error_string(error, text, &size);
    return text;
  }

  int class_of(int error) const {
    int found = error;
    mpi_.error_class(error, &found);
    return found;
  }

  int error_in(const std::byte* status) const {
    int error = kMpiSuccess;
    std::memcpy(&error, status + is_.error_offset, sizeof(error));
    return error;
  }

  // Of what is under way.
  void remove(std::size_t gap) {
    requests_[gap] = requests_.back();
    owners_[gap] = owners_.back();
    slots_[owners_[gap]].request = gap;
    requests_.pop_back();
    owners_.pop_back();
  }

  void lose(Slot& slot, const std::string& how) {
    slot.outcome = Outcome::kLost;
    if (slot.rank != kAnyRank) losses_.push_back({slot.rank, how});
  }

  // What MPI tells of a message; false where it goes on all the same.
  bool end(Slot& slot, const std::byte* status, int error) {
    if (error != kMpiSuccess) {
      const int kind = class_of(error);
      if (kind == is_.proc_failed_pending) return false;
      if (kind == is_.proc_failed)
        lose(slot, text_of(error));
      else
        slot.outcome = Outcome::kLost;  // and progress() throws
      return true;
    }
    int cancelled = 0;
    if (slot.cancelled) mpi_.test_cancelled(status, &cancelled);
    slot.outcome = cancelled ? Outcome::kCancelled : Outcome::kDone;
    return true;
  }

  Transfer begun(int error, const char* call, Handle request, int rank, bool receives) {
    const bool lost = error != kMpiSuccess && class_of(error) == is_.proc_failed;
    if (!lost) check(error, call);
    if (free_.empty()) {
      free_.push_back(slots_.size());
      slots_.emplace_back();
    }
    const std::size_t slot = free_.back();
    free_.pop_back();
    slots_[slot] = {requests_.size(), Outcome::kUnderWay, rank, receives, false, slots_[slot].uses};
    if (lost) {
      lose(slots_[slot], text_of(error));
    } else {
      requests_.push_back(request);
      owners_.push_back(slot);
    }
    if (completed_.size() < requests_.size()) {
      completed_.resize(2 * requests_.size());
      statuses_.resize(completed_.size() * is_.status_bytes);
    }
    return Transfer{slots_[slot].uses} << 32 | (slot + 1);
  }

  const MpiFunctions<Handle> mpi_;
  const MpiConstants is_;
  Handle comm_;
  const Handle byte_;
  const Handle null_;
  const std::vector<int> ranks_;
  std::vector<Handle> requests_;     // under way
  std::vector<std::size_t> owners_;  // the slot of each
  std::vector<Slot> slots_;          // by transfer
  std::vector<std::size_t> free_;    // slots
  std::vector<int> completed_;
  std::vector<std::byte> statuses_;
  std::deque<Loss> losses_;
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
