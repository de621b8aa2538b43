#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/errors_py.h"
#include "bindings/gil.h"
#include "bindings/objects.h"
#include "mpi/link.h"

namespace py = pybind11;

namespace pycollective {

Token token_from_bytes(const std::string& bytes) {
  Token token;
  if (bytes.size() != sizeof(token)) throw std::invalid_argument("a token has 16 bytes");
  std::memcpy(token.data(), bytes.data(), sizeof(token));
  return token;
}

NodeHandle::NodeHandle()
    : node(std::make_shared<Node>()), progress(std::make_shared<Progress>(node)) {
  remember(progress);
}

MailboxRange NodeHandle::allocate(int ranks, bool internode) {
  const MailboxRange range = node->allocate_mailbox(ranks, internode);
  const std::lock_guard lock(mutex_);
  allocated_[range.offset] = range;
  return range;
}

MailboxRange NodeHandle::take(std::size_t offset) {
  const std::lock_guard lock(mutex_);
  const auto found = allocated_.find(offset);
  if (found == allocated_.end())
    throw std::invalid_argument("no mailbox was allocated at this offset");
  const MailboxRange range = found->second;
  allocated_.erase(found);
  return range;
}

void NodeHandle::release(std::size_t offset) {
  const MailboxRange range = take(offset);
  node->retire({Member(0), range, {}, 0, {}, {}, nullptr});  // nobody else knows of it
}

void bind_node(py::module_& module) {
  py::class_<NodeHandle>(module, "Node", py::is_final(),
                         "This process's end of shared memory: one sealed segment for all its "
                         "groups, and the peers' segments attached to it. Thread-safe.")
      .def(py::init([] { return translated([] { return std::make_unique<NodeHandle>(); }); }))
      .def_property_readonly(
          "token",
          [](const NodeHandle& self) {
            const Token& token = self.node->token();
            return py::bytes(reinterpret_cast<const char*>(token.data()), sizeof(token));
          },
          "16 random bytes that name the segment.")
      .def("fileno", [](const NodeHandle& self) { return self.node->fd(); })
      .def_property_readonly("forked", [](const NodeHandle& self) { return self.node->forked(); })
      .def(
          "attach",
          [](NodeHandle& self, const py::bytes& token, int fd, int pid) {
            translated([&] { self.node->attach(token_from_bytes(token), fd, pid); });
          },
          py::arg("token"), py::arg("fd"), py::arg("pid"),
          "Map the segment behind `fd` (which stays the caller's) and watch process `pid`.\n\n"
          "Raises ConfigurationError if it is no sealed segment with that token, or cannot be "
          "watched.")
      .def(
          "is_attached",
          [](const NodeHandle& self, const py::bytes& token) {
            return translated([&] { return self.node->find(token_from_bytes(token)) != nullptr; });
          },
          py::arg("token"))
      .def(
          "refusal",
          [](const NodeHandle& self, const py::bytes& token) {
            return translated([&] {
              const std::shared_ptr<Peer> peer = self.node->find(token_from_bytes(token));
              if (!peer) throw std::invalid_argument("no segment of that token is attached");
              return peer->refusal();
            });
          },
          py::arg("token"),
          "Whether this process may read the memory of the one whose segment is attached: 0, or "
          "the errno that it was refused with.")
      .def(
          "has_mailbox",
          [](const NodeHandle& self, const py::bytes& token, std::size_t offset,
             std::size_t data_bytes, int size) {
            return translated([&] {
              const std::shared_ptr<Peer> peer = self.node->find(token_from_bytes(token));
              if (!peer || size < 1 || size > kMaxMembers) return false;
              const Mailbox* mailbox = find_mailbox(peer->segment(), offset, size, data_bytes);
              return mailbox != nullptr && mailbox->data_bytes == data_bytes;
            });
          },
          py::arg("token"), py::arg("offset"), py::arg("data_bytes"), py::arg("size"),
          "Whether the attached segment of that token has a mailbox there, as its owner's "
          "allocate(size) has given it.")
      .def(
          "allocate",
          [](NodeHandle& self, int size, bool internode) {
            const MailboxRange range = translated([&] {
              const GilReleased unlocked;  // what is reclaimed meanwhile may wait for a GPU
              return self.allocate(size, internode);
            });
            return py::make_tuple(range.offset, range.data_bytes);
          },
          py::arg("size"), py::arg("internode") = false,
          "Commit a mailbox for a group of `size` ranks; `internode`: it has others on other "
          "hosts. Returns (offset in the segment, bytes of its data area).")
      .def(
          "release",
          [](NodeHandle& self, std::size_t offset) { translated([&] { self.release(offset); }); },
          py::arg("offset"), "Give back a mailbox that no communicator was made of.")
      .def(
          "reclaim",
          [](NodeHandle& self) {
            translated([&] {
              const GilReleased unlocked;  // what is freed may wait for a GPU
              self.node->reclaim();
            });
          },
          "Free what groups that all have left still hold, and forget the memory of the dead.")
      .def(
          "mailbox_bytes",
          [](const NodeHandle& self, int size, bool internode) {
            return self.node->mailbox_bytes(size, internode);
          },
          py::arg("size"), py::arg("internode") = false,
          "Bytes of shared memory that allocate(size, internode) would commit now.");
}

namespace {

py::capsule mpi_link(const std::string& library, std::size_t handle_bytes, std::size_t status_bytes,
                     std::uint64_t byte, std::uint64_t null_request, int any_source,
                     std::size_t error_offset, int in_status, int proc_failed,
                     int proc_failed_pending, std::uint64_t comm, std::vector<int> ranks,
                     bool frees_unused) {
  return translated([&] {
    auto link = make_mpi_link({library, handle_bytes, status_bytes, byte, null_request, any_source,
                               error_offset, in_status, proc_failed, proc_failed_pending},
                              comm, std::move(ranks), frees_unused);
    return py::capsule(new std::shared_ptr<Link>(std::move(link)), kLinkCapsule, [](PyObject* it) {
      delete static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(it, kLinkCapsule));
    });
  });
}

}  // namespace

std::shared_ptr<Link> link_in(const py::object& capsule) {
  const auto* link =
      static_cast<std::shared_ptr<Link>*>(PyCapsule_GetPointer(capsule.ptr(), kLinkCapsule));
  if (link == nullptr) throw py::error_already_set();
  return *link;
}

void bind_link(py::module_& module) {
  module.def(
      "mpi_link", &mpi_link, py::arg("library"), py::arg("handle_bytes"), py::arg("status_bytes"),
      py::arg("byte"), py::arg("null_request"), py::arg("any_source"), py::arg("error_offset"),
      py::arg("in_status"), py::arg("proc_failed"), py::arg("proc_failed_pending"), py::arg("comm"),
      py::arg("ranks"), py::arg("frees_unused"),
      "A link over MPI, in a capsule: of `comm`, a communicator's handle, which it frees when "
      "it is closed, or, with `frees_unused`, if it is never used; "
      "`ranks`: the number there of each rank. The rest is as mpi4py knows it.");
}

}  // namespace pycollective
