#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "residency/chain.hpp"
#include "residency/deferred/tape.hpp"

namespace accelerate::residency::deferred {

/// One init_empty_weights() or init_on_device() of this thread; scopes form a stack.
struct RecordScope {
  RecordScope* outer = nullptr;
  std::shared_ptr<Tape> tape;        ///< null: no recording
  std::optional<at::Device> device;  ///< for factory functions that name none
  /// Deferred tensors that operators of this scope have returned.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> born;
  size_t prune_at = 1024;
  const ProcessHandler recorded{Link::record, recorder()};
  std::optional<AllOperators> all;  ///< while it is entered

  void remember(const at::Tensor& tensor);
};

RecordScope* current_scope();
/// All operators of this thread come by between the two.
void enter(RecordScope& scope);
void leave(RecordScope& scope);

}  // namespace accelerate::residency::deferred
