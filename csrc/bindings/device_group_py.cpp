#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/gil.h"
#include "bindings/objects.h"
#include "engine/gpu/device_group.h"

namespace py = pybind11;

namespace pycollective {
namespace {

// To let go of either may wait for the GPU.
template <class T>
struct Handle {
  explicit Handle(std::shared_ptr<T> shared) : it(std::move(shared)) {}
  ~Handle() {
    const GilReleased unlocked;
    it.reset();
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  std::shared_ptr<T> it;
};
using MailboxHandle = Handle<DeviceMailbox>;
using GroupHandle = Handle<DeviceGroup>;

std::shared_ptr<Communicator> communicator_of(const py::object& object) {
  if (CommunicatorObject::core_of(object.ptr()) == nullptr) throw py::error_already_set();
  return *CommunicatorObject::of(object.ptr()).core;
}

std::unique_ptr<MailboxHandle> make_mailbox(int device,
                                            const std::vector<std::string>& nvrtc_folders) {
  return translated([&] {
    std::shared_ptr<DeviceMailbox> made;
    {
      const GilReleased unlocked;
      Node::unmap_retired();
      DeviceGroup::make_room(device);
      made = std::make_shared<DeviceMailbox>(device, nvrtc_folders);
    }
    return std::make_unique<MailboxHandle>(std::move(made));
  });
}

py::bytes export_mailbox(const MailboxHandle& handle, const py::object& communicator) {
  const std::shared_ptr<Communicator> core = communicator_of(communicator);
  handle.it->export_memory();
  core->group().set_mapped(handle.it);
  const DeviceCard& card = handle.it->card();
  return {reinterpret_cast<const char*>(&card), sizeof(card)};
}

py::bytes gpu_of(const py::bytes& given) {
  const std::string card = given;
  if (card.size() != sizeof(DeviceCard)) throw std::invalid_argument("no such card");
  return {card.data() + offsetof(DeviceCard, gpu), sizeof(DeviceCard::gpu)};
}

std::unique_ptr<GroupHandle> map_devices(const py::object& communicator, const MailboxHandle& own,
                                         const std::vector<py::bytes>& cards) {
  std::vector<DeviceCard> read(cards.size());
  for (std::size_t i = 0; i < cards.size(); ++i) {
    const std::string card = cards[i];
    if (card.size() != sizeof(DeviceCard)) throw std::invalid_argument("no such card");
    std::memcpy(&read[i], card.data(), sizeof(DeviceCard));
  }
  const std::shared_ptr<Communicator> core = communicator_of(communicator);
  return translated([&] {
    std::shared_ptr<DeviceGroup> made;
    {
      const GilReleased unlocked;
      // All have come here, and have unmapped what they had of communicators that they left.
      core->group().node().reclaim();
      made = std::make_shared<DeviceGroup>(own.it, core->group().me(), read);
      core->group().set_mapped(made);
    }
    return std::make_unique<GroupHandle>(std::move(made));
  });
}

// Unmaps what is mapped for a communicator that will not use it. Returns whether that is done.
bool unmap_devices(const GroupHandle& handle) {
  const GilReleased unlocked;
  return handle.it->unmap_peers();
}

// No peer maps the mailbox, and none will.
void take_back(const MailboxHandle& handle, const py::object& communicator) {
  const std::shared_ptr<Communicator> core = communicator_of(communicator);
  const GilReleased unlocked;
  handle.it->nobody_maps();
  core->group().set_mapped(nullptr);
}

void use_devices(const py::object& communicator, const GroupHandle& handle) {
  const std::shared_ptr<Communicator> core = communicator_of(communicator);
  handle.it->set_source(
      [plans = core->plans()](OpKind kind, int root) { return plans->of(kind, "direct", root); });
  core->set_device(handle.it);
}

}  // namespace

void bind_device_group(py::module_& module) {
  py::class_<MailboxHandle>(module, "DeviceMailbox", py::is_final(),
                            "A rank's mailbox in the memory of its GPU, before its group has met.")
      .def(py::init(&make_mailbox), py::arg("device"), py::arg("nvrtc_folders"),
           "Load the kernels and make a mailbox. Unmaps before what peers own of communicators "
           "that were left. ConfigurationError: what there is not.")
      .def("export", &export_mailbox, py::arg("communicator"),
           "What peers need to map it. From now on it is not freed before they have left and "
           "unmapped it, or died, or take_back().")
      .def("take_back", &take_back, py::arg("communicator"), "No peer maps it, and none will.");
  py::class_<GroupHandle>(module, "DeviceGroup", py::is_final(),
                          "The mailboxes of all ranks of a communicator, mapped.")
      .def("unmap", &unmap_devices,
           "Unmap the peers' where no communicator uses it. Returns whether that is done.");
  module.def("gpu_of", &gpu_of, py::arg("card"), "The GPU's uuid.");
  module.def("map_devices", &map_devices, py::arg("communicator"), py::arg("mailbox"),
             py::arg("cards"),
             "Map the mailboxes of all ranks. ConfigurationError: one cannot be.");
  module.def("use_devices", &use_devices, py::arg("communicator"), py::arg("group"),
             "From now on calls on arrays of this GPU are carried out by kernels. On all ranks or "
             "none.");
}

}  // namespace pycollective
