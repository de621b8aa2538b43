#include "bindings/link_py.h"

#include <pybind11/stl.h>

#include <atomic>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>

namespace py = pybind11;

namespace pycollective {
namespace {

class PythonLink final : public Link {
  static py::object view(void* data, std::size_t bytes, bool read_only) {
    // An empty view needs an address as well.
    static std::byte nothing;
    return py::memoryview::from_memory(data != nullptr ? data : &nothing,
                                       static_cast<py::ssize_t>(bytes), read_only);
  }

  template <class Act>
  auto asked(int rank, const Act& act) {
    const py::gil_scoped_acquire gil;
    try {
      if (closed_ && rank >= 0) throw std::runtime_error("the link is closed");
      return act();
    } catch (py::error_already_set& error) {
      std::string what = error.what();
      throw CollectiveFailure({FailureKind::kPeerFailure, -1, OpKind::kBarrier, 0,
                               "the transport " +
                                   (rank >= 0 ? "to rank " + std::to_string(rank) + " " : "") +
                                   "failed: " + what.substr(0, what.find('\n'))});
    }
  }

  template <class Act>
  void quietly(const Act& act) noexcept {
    if (closed_) return;
    const py::gil_scoped_acquire gil;
    try {
      if (!closed_) act();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a link of pycollective");
    }
  }

 public:
  PythonLink(py::object pump, std::shared_ptr<Node> node) : pump_(std::move(pump)) {
    const auto ring = [node = std::move(node)] { node->own()->ring(); };
    const py::capsule bell(new Bell(ring), kBellName, [](PyObject* object) {
      delete static_cast<Bell*>(PyCapsule_GetPointer(object, kBellName));
    });
    rings_ = pump_.attr("ring_with")(bell).template cast<bool>();
  }

  ~PythonLink() override {
    if (closed_) return;  // and the pump with it: there may be no interpreter any more
    const py::gil_scoped_acquire gil;
    pump_ = {};
  }

  Ticket isend(int rank, int tag, const void* data, std::size_t bytes) override {
    return asked(rank, [&] {
      return pump_.attr("isend")(rank, tag, view(const_cast<void*>(data), bytes, true))
          .template cast<Ticket>();
    });
  }

  Ticket irecv(int rank, int tag, void* data, std::size_t bytes) override {
    return asked(rank, [&] {
      return pump_.attr("irecv")(rank, tag, view(data, bytes, false)).template cast<Ticket>();
    });
  }

  void poll() override {
    if (closed_) return;
    asked(-1, [&] {
      if (closed_) return 0;
      const auto polled = pump_.attr("poll")();
      if (polled.is_none()) return 0;
      auto [tickets, notices] = polled.cast<
          std::pair<std::vector<Ticket>, std::vector<std::tuple<int, int, std::string>>>>();
      const std::lock_guard lock(mutex_);
      done_.insert(tickets.begin(), tickets.end());
      if (!notices.empty() && !notice_) {
        auto& [kind, reporter, report] = notices.front();
        notice_ = std::make_shared<Notice>(
            Notice{static_cast<FailureKind>(kind), reporter, std::move(report)});
      }
      return 0;
    });
  }

  bool done(Ticket ticket) override {
    const std::lock_guard lock(mutex_);
    return done_.erase(ticket) != 0;
  }

  void give_up(const std::vector<Ticket>& tickets) noexcept override {
    quietly([&] { pump_.attr("give_up")(tickets); });
    const std::lock_guard lock(mutex_);
    for (const Ticket ticket : tickets) done_.erase(ticket);
  }

  void tell(const Notice& notice) noexcept override {
    quietly([&] { pump_.attr("tell")(static_cast<int>(notice.kind), notice.report); });
  }

  std::shared_ptr<const Notice> notice() override {
    const std::lock_guard lock(mutex_);
    return notice_;
  }

  bool rings() const override { return rings_; }

  void close() noexcept override {
    quietly([&] {
      pump_.attr("close")();
      pump_ = {};
      closed_ = true;
    });
  }

 private:
  py::object pump_;
  bool rings_ = false;
  std::atomic<bool> closed_{false};  // set with the GIL held, once
  std::mutex mutex_;  // taken with the GIL or without, and nothing is waited for under it
  std::unordered_set<Ticket> done_;
  std::shared_ptr<const Notice> notice_;
};

}  // namespace

std::shared_ptr<Link> make_python_link(py::object pump, std::shared_ptr<Node> node) {
  return std::make_shared<PythonLink>(std::move(pump), std::move(node));
}

}  // namespace pycollective
