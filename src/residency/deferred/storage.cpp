#include "residency/deferred/storage.hpp"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <torch/csrc/autograd/variable.h>

#include "residency/deferred/plain.hpp"
#include "residency/deferred/tape.hpp"
#include "residency/member.hpp"

namespace accelerate::residency::deferred {
namespace {

/// Marks a storage as deferred; the context is its Owner.
void storage_ends(void* context) {
  const std::unique_ptr<Owner> owner(static_cast<Owner*>(context));
  owner->tape->forget(owner->node);
}

c10::StorageImpl* storage_of(const c10::TensorImpl& impl) {
  return impl.has_storage() ? impl.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

const Owner* owner_of(const c10::TensorImpl& impl) {
  if (!impl.key_set().has(kKey)) return nullptr;
  c10::StorageImpl* storage = storage_of(impl);
  if (!storage) return nullptr;
  const at::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &storage_ends ? static_cast<const Owner*>(data.get_context()) : nullptr;
}

/// Whether asking for the data pointer throws. LibTorch 2.11 can't take that back, so there a deferred tensor gives a
/// null pointer like any meta tensor.
template <class Storage> void guard_data(Storage& storage, bool guarded) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    if (!guarded) storage.clear_data_ptr_access_error_msg_();
    else
      storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
          "found a tensor that is not initialised yet (init_empty_weights), expected values: its data was asked for "
          "outside of an operator; call accelerate::materialize(module) or load weights first");
  }
}

c10::intrusive_ptr<c10::TensorImpl> make(const at::Tensor& like, const at::Storage& storage, c10::DispatchKeySet keys) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return impl;
}

/// The keys of a plain tensor on `device`; whether it is a conjugate or negative view is a key too.
c10::DispatchKeySet keys_for(const at::Tensor& like, const at::Device& device) {
  constexpr c10::DispatchKeySet kBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const c10::DispatchKeySet backend(c10::computeDispatchKey(like.scalar_type(), at::kStrided, device));
  return backend | (like.key_set() & kBits);
}

}  // namespace

const Owner* owner_of(const at::Tensor& tensor) {
  return tensor.defined() ? owner_of(*tensor.unsafeGetTensorImpl()) : nullptr;
}

void mark(const at::Tensor& fresh, const std::shared_ptr<Tape>& tape, size_t node) {
  c10::StorageImpl* storage = storage_of(*fresh.unsafeGetTensorImpl());
  storage->_mutable_data_ptr_no_checks() =
      at::DataPtr(nullptr, new Owner{tape, node}, &storage_ends, at::Device(at::kMeta));
  guard_data(*storage, true);
}

OpenForMeta::OpenForMeta(c10::ArrayRef<at::Tensor> tensors) : tensors_(tensors) {
  for (const at::Tensor& tensor : tensors_) guard_data(*storage_of(*tensor.unsafeGetTensorImpl()), false);
}

OpenForMeta::~OpenForMeta() {
  for (const at::Tensor& tensor : tensors_)
    if (owner_of(tensor)) guard_data(*storage_of(*tensor.unsafeGetTensorImpl()), true);
}

void tag(const at::Tensor& tensor) {
  // set_data() exchanges tensors of different backends only if both are of the usual ones, and meta is none. The
  // dispatcher takes the later of two backends in a key set, which is meta, so that the CPU's changes nothing but
  // that.
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->shallow_copy_from(
      make(tensor, tensor.storage(), impl->key_set().add(kKey) | c10::DispatchKeySet(c10::BackendComponent::CPUBit)));
}

at::Tensor with_storage(const at::Tensor& like, const at::Storage& storage) {
  Plain plain;
  return at::Tensor(make(like, storage, keys_for(like, storage.device())));
}

void adopt(const at::Tensor& tensor, const at::Storage& real) {
  // The owner, who may hold `real`, ends with the last tensor that is adopted.
  const at::Storage kept = real;  // NOLINT(performance-unnecessary-copy-initialization)
  {
    const c10::InferenceMode kind(tensor.is_inference());
    tensor.unsafeGetTensorImpl()->shallow_copy_from(make(tensor, kept, keys_for(tensor, kept.device())));
  }
  // The node that accumulates gradients remembers the device; a new one is made when it is needed.
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
}

}  // namespace accelerate::residency::deferred
