#include "bindings/dlpack_export.h"

#include <utility>

namespace pycollective::dlpack {
namespace {

// As it was before versions.
struct UnversionedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(UnversionedTensor*);
};

// What a capsule points to, and all that it needs.
template <class Managed>
struct Holder {
  Managed managed;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::shared_ptr<const void> owner;
};

template <class Managed>
constexpr const char* kName = "dltensor";
template <>
constexpr const char* kName<VersionedTensor> = "dltensor_versioned";

template <class Managed>
void destroy(PyObject* capsule) {
  // A consumer that has taken the tensor over has given the capsule another name.
  if (!PyCapsule_IsValid(capsule, kName<Managed>)) return;
  auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, kName<Managed>));
  managed->deleter(managed);
}

template <class Managed>
PyObject* make(const Exported& exported, std::shared_ptr<const void> owner) {
  auto holder = std::make_unique<Holder<Managed>>();
  holder->shape = exported.shape;
  holder->strides.resize(exported.shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = exported.shape.size(); i-- > 0; stride *= exported.shape[i])
    holder->strides[i] = stride;
  holder->owner = std::move(owner);
  Managed& managed = holder->managed;
  managed = {};
  if constexpr (std::is_same_v<Managed, VersionedTensor>) managed.version = {1, 0};
  managed.tensor = {exported.data,
                    exported.device,
                    static_cast<std::int32_t>(exported.shape.size()),
                    exported.dtype,
                    holder->shape.data(),
                    holder->strides.data(),
                    0};
  managed.manager = holder.get();
  managed.deleter = [](Managed* self) { delete static_cast<Holder<Managed>*>(self->manager); };
  PyObject* capsule = PyCapsule_New(&managed, kName<Managed>, &destroy<Managed>);
  if (capsule != nullptr) holder.release();
  return capsule;
}

}  // namespace

PyObject* make_capsule(const Exported& tensor, std::shared_ptr<const void> owner, bool versioned) {
  return versioned ? make<VersionedTensor>(tensor, std::move(owner))
                   : make<UnversionedTensor>(tensor, std::move(owner));
}

}  // namespace pycollective::dlpack
