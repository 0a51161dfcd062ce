#include "residency/member.hpp"

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <torch/version.h>

#include <memory>

#include "accelerate/utils/error.hpp"
#include "residency/replaced.hpp"
#include "residency/unit.hpp"

namespace accelerate::residency {
namespace {

/// Marks a storage as a member's; the context is the Member. Frees nothing: the unit owns the bytes.
void belongs_to_member(void*) {}

/// Marks the storage of a member that has gone; the context is the text that says so.
void delete_text(void* text) { delete static_cast<std::string*>(text); }

at::DataPtr pointer(void* data, Member* member, const at::Device& device) {
  return {data, member, &belongs_to_member, device};
}

/// Null: there is no storage.
const at::DataPtr* data_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return &tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
}

c10::intrusive_ptr<c10::StorageImpl> make_storage(size_t bytes, at::DataPtr data) {
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(bytes),
                                               std::move(data), /*allocator=*/nullptr, /*resizable=*/false);
}

/// Before 2.13 a storage that refuses access can't be told to allow it again; there an absent tensor meets LibTorch's
/// own "data is not allocated yet".
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13)
void refuse_access(c10::StorageImpl& storage, const std::string& why) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(why);
}
void allow_access(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }
#else
void refuse_access(c10::StorageImpl&, const std::string&) {}
void allow_access(c10::StorageImpl&) {}
#endif

}  // namespace

std::string Member::absent_text() const {
  if (part_.absent) return part_.absent(name_);
  return "parameter '" + name_ +
         "' is not resident: its data was asked for outside of an operator (data_ptr(), torch::save, accessors) while "
         "its bytes are elsewhere; save a prepared model by accelerator.save_model(), or what "
         "accelerator.get_state_dict() gives rank 0 (all ranks call either); put residency::summon(module) around "
         "other such code, with writeback = false where it is in few bits";
}

Home& Member::home() const { return *part_.home; }

Member::Member(Unit& unit, Part& part, std::string name, at::Tensor tensor, int64_t offset, bool faults)
    : unit_(unit),
      part_(part),
      name_(std::move(name)),
      tensor_(std::move(tensor)),
      offset_(offset),
      numel_(tensor_.numel()),
      bytes_before_(static_cast<size_t>(offset) * c10::elementSize(part.dtype)) {
  const auto dtype = part.dtype;
  const auto device = part.device;
  const size_t bytes = static_cast<size_t>(numel_) * c10::elementSize(dtype);
  storage_ = make_storage(bytes, pointer(nullptr, this, device));
  refuse_access(*storage_, absent_text());
  // The new storage takes the place of the old one inside the same TensorImpl: what else refers to it, autograd
  // included, sees the new one.
  auto keys = at::empty({0}, at::TensorOptions().device(device).dtype(dtype)).key_set();
  if (faults) keys = keys.add(kKey);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage_), keys, c10::scalarTypeToTypeMeta(dtype));
  if (tensor_.is_non_overlapping_and_dense()) impl->set_sizes_and_strides(tensor_.sizes(), tensor_.strides());
  else impl->set_sizes_contiguous(tensor_.sizes());
  tensor_.unsafeGetTensorImpl()->shallow_copy_from(impl);
  say_replaced(tensor_);
}

Member::~Member() {
  close();
  auto why = std::make_unique<std::string>(
      part_.absent ? part_.absent(name_)
                   : "parameter '" + name_ +
                         "' is not resident any more: what Accelerator::prepare or dispatch made of its model has been "
                         "destroyed; keep that while the module is in use");
  refuse_access(*storage_, *why);
  const auto device = storage_->device();
  storage_->_mutable_data_ptr_no_checks() = {nullptr, why.release(), &delete_text, device};
}

Member* Member::of(const at::Tensor& tensor) {
  // Not by the key: members whose bytes are always there have none.
  const auto* const data = data_of(tensor);
  return data && data->get_deleter() == &belongs_to_member ? static_cast<Member*>(data->get_context()) : nullptr;
}

void Member::refuse_gone(const at::Tensor& tensor) {
  const auto* const data = data_of(tensor);
  if (data && data->get_deleter() == &delete_text)
    throw ConfigError(*static_cast<const std::string*>(data->get_context()));
}

bool Member::intact() const {
  return tensor_.has_storage() &&
         tensor_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage_.get();
}

void Member::open(void* base) {
  if (open_) return;
  storage_->set_data_ptr_noswap(
      pointer(base ? static_cast<char*>(base) + bytes_before_ : nullptr, this, storage_->device()));
  allow_access(*storage_);
  open_ = true;
}

void Member::close() {
  if (!open_) return;
  storage_->set_data_ptr_noswap(pointer(nullptr, this, storage_->device()));
  refuse_access(*storage_, absent_text());
  open_ = false;
}

}  // namespace accelerate::residency
