#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>

namespace accelerate::residency::deferred {

class Tape;

/// The identity of a deferred storage: the tape that knows how its bytes come about, and the number there.
struct Owner {
  std::shared_ptr<Tape> tape;
  size_t node;
};

/// The owner of `tensor`'s storage if that is deferred; else null. Views, detached copies and `tensor.data()` share the
/// storage, and with it the owner.
const Owner* owner_of(const at::Tensor& tensor);

/// Makes the storage of a fresh meta tensor a deferred one: its memory throws when asked for, its end is told to the
/// tape.
void mark(const at::Tensor& fresh, const std::shared_ptr<Tape>& tape, size_t node);

/// While it lives, asking for the null pointers of these deferred tensors is no error: operators on meta tensors
/// compare them.
class OpenForMeta {
 public:
  explicit OpenForMeta(c10::ArrayRef<at::Tensor> tensors);
  OpenForMeta(const OpenForMeta&) = delete;
  OpenForMeta& operator=(const OpenForMeta&) = delete;
  ~OpenForMeta();

 private:
  c10::ArrayRef<at::Tensor> tensors_;
};

/// Gives a meta tensor the members' dispatch key, and lets set_data() fill it with a tensor of a real device.
void tag(const at::Tensor& tensor);

/// A meta tensor of the same sizes, strides and dtype over `storage`, known to nobody.
at::Tensor with_storage(const at::Tensor& like, const at::Storage& storage);

/// Puts the real storage below the tensor, which keeps its TensorImpl, geometry, autograd identity and version.
void adopt(const at::Tensor& tensor, const at::Storage& real);

}  // namespace accelerate::residency::deferred
