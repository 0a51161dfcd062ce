#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

namespace accelerate::residency {

class Home;
class Unit;
struct Part;
struct EncodedWeight;

/// The key that members carry, so that every operator on them, and on views of them, comes by the fallback first.
/// PyTorch itself does not use it.
inline constexpr auto kKey = c10::DispatchKey::DeferredInit;

inline bool has_key(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->key_set().has(kKey);
}

/// One tensor of a model whose bytes come and go. It keeps its TensorImpl (sizes, dtype, identity for autograd) and
/// gets a storage of its own, which points into its unit's flat storage while that is present and throws an error with
/// the tensor's name while it is not. All views share that storage.
class Member {
 public:
  /// Takes the tensor over: its storage is replaced by an absent one. It has `dtype` from now on; a leaf must
  /// not have been used in a graph yet.
  Member(Unit& unit, Part& part, std::string name, at::Tensor tensor, int64_t offset, bool faults);
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;
  /// A tensor that still refers to the storage meets an error that says so.
  ~Member();

  /// The member that owns the storage of `tensor` (a member, or any view of one); null for other tensors.
  static Member* of(const at::Tensor& tensor);
  /// @throws ConfigError, which says why, for a tensor whose member has gone, or any view of one
  static void refuse_gone(const at::Tensor& tensor);

  Unit& unit() const { return unit_; }
  const Part& part() const { return part_; }
  Home& home() const;
  const std::string& name() const { return name_; }
  const at::Tensor& tensor() const { return tensor_; }
  int64_t numel() const { return numel_; }
  /// Elements from the start of the flat storage.
  int64_t offset() const { return offset_; }
  /// Its bytes are codes, and these are they; null for others.
  EncodedWeight* encoded() const { return encoded_; }
  void set_encoded(EncodedWeight* encoded) { encoded_ = encoded; }
  /// Other ranks have rounded their slices of what was written here: whoever looks at it looks at theirs.
  bool is_behind() const { return is_behind_; }
  void set_behind(bool behind) { is_behind_ = behind; }
  /// It is no parameter, but what this process decides of a flat storage that others compute with.
  bool is_slice() const { return is_slice_; }
  void set_slice() { is_slice_ = true; }
  /// The module still holds this tensor with this storage (module->to(...) replaces it).
  bool intact() const;

  /// `base`: the flat storage's first byte; null on the meta device.
  void open(void* base);
  void close();
  /// Its bytes lie elsewhere from now on.
  void move(void* base) {
    open_ = false;
    open(base);
  }

 private:
  std::string absent_text() const;

  Unit& unit_;
  Part& part_;
  std::string name_;
  at::Tensor tensor_;
  int64_t offset_, numel_;
  size_t bytes_before_;  ///< offset in bytes
  c10::intrusive_ptr<c10::StorageImpl> storage_;
  bool open_ = false, is_slice_ = false, is_behind_ = false;
  EncodedWeight* encoded_ = nullptr;
};

}  // namespace accelerate::residency
