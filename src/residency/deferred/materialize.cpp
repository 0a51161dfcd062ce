#include "residency/deferred/materialize.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <exception>
#include <set>
#include <tuple>

#include "accelerate/residency/deferred.hpp"
#include "memory/meta_memory.hpp"
#include "residency/deferred/plain.hpp"
#include "residency/deferred/record.hpp"
#include "residency/deferred/storage.hpp"

namespace accelerate {
namespace deferred = residency::deferred;
namespace {

using deferred::Owner;
using deferred::Tape;

struct DeferredTarget {
  std::string name;
  at::Tensor tensor;
  Owner owner;
};

/// Deferred tensors of the model, those of one tape together, in the order of their last initialisers: so random
/// operators follow each other.
std::vector<DeferredTarget> targets_of(const ModelRef& model) {
  std::vector<DeferredTarget> targets;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [name, tensor] : model.state())
    if (const Owner* owner = deferred::owner_of(tensor); owner && seen.insert(tensor.unsafeGetTensorImpl()).second)
      targets.push_back({name, tensor, *owner});
  std::stable_sort(targets.begin(), targets.end(), [](const DeferredTarget& a, const DeferredTarget& b) {
    return std::tuple(a.owner.tape.get(), a.owner.tape->last_write(a.owner.node)) <
           std::tuple(b.owner.tape.get(), b.owner.tape->last_write(b.owner.node));
  });
  return targets;
}

void advance_generators(const std::vector<DeferredTarget>& targets) {
  std::set<Tape*> tapes;
  for (const auto& target : targets)
    if (tapes.insert(target.owner.tape.get()).second) target.owner.tape->advance_generators(/*all_of_them=*/true);
}

/// The tensors that were born in the scope, still exist and need no gradient, nor share memory with a tensor that does.
std::vector<at::Tensor> buffers_of(const deferred::RecordScope& scope) {
  std::vector<at::Tensor> alive;
  std::set<size_t> trained;
  for (const auto& weak : scope.born) {
    at::Tensor tensor(weak.lock());
    const Owner* owner = deferred::owner_of(tensor);
    if (!owner || owner->tape != scope.tape) continue;
    if (tensor.requires_grad()) trained.insert(owner->node);
    alive.push_back(std::move(tensor));
  }
  std::erase_if(alive, [&](const at::Tensor& tensor) { return trained.contains(deferred::owner_of(tensor)->node); });
  return alive;
}

/// A storage of the tensor's size, on the meta device.
at::Storage sizes_of(const at::Tensor& tensor) {
  deferred::Plain plain;
  return at::empty({static_cast<int64_t>(tensor.storage().nbytes())},
                   at::TensorOptions().dtype(at::kByte).device(at::kMeta))
      .storage();
}

/// Every tensor of the model becomes a plain one of the meta device; initialisers are not run and generators stay as
/// they are.
void materialize_sizes(const ModelRef& model) {
  const meta_memory::Purpose all(MemoryUse::parameters);
  std::set<const c10::TensorImpl*> seen;
  for (const auto& [name, tensor] : model.state())
    if ((is_deferred(tensor) || !tensor.is_meta()) && seen.insert(tensor.unsafeGetTensorImpl()).second)
      deferred::adopt(tensor, sizes_of(tensor));
}

}  // namespace

struct InitScope::Impl {
  deferred::RecordScope scope;
  bool include_buffers = true;
  int exceptions = std::uncaught_exceptions();
};

InitScope::InitScope(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) { deferred::enter(impl_->scope); }

InitScope::~InitScope() {
  deferred::leave(impl_->scope);
  if (impl_->include_buffers || std::uncaught_exceptions() > impl_->exceptions) return;
  try {
    const auto& tape = impl_->scope.tape;
    deferred::Plain plain;
    for (const at::Tensor& buffer : buffers_of(impl_->scope))
      if (const Owner* owner = deferred::owner_of(buffer)) deferred::adopt(buffer, tape->materialize(owner->node));
    tape->advance_generators(/*all_of_them=*/false);
  } catch (const std::exception&) {  // documented: whoever uses them hears of it
  }
}

InitScope init_empty_weights(const InitEmptyWeightsOptions& options) {
  auto impl = std::make_unique<InitScope::Impl>();
  // An inner scope goes on with the outer one's tape: their modules may share tensors, and their random numbers follow
  // each other.
  for (const deferred::RecordScope* scope = deferred::current_scope(); scope && !impl->scope.tape; scope = scope->outer)
    impl->scope.tape = scope->tape;
  if (!impl->scope.tape) impl->scope.tape = std::make_shared<Tape>();
  impl->include_buffers = options.include_buffers;
  return InitScope(std::move(impl));
}

InitScope init_on_device(const at::Device& device) {
  auto impl = std::make_unique<InitScope::Impl>();
  impl->scope.device = device;
  return InitScope(std::move(impl));
}

bool is_deferred(const at::Tensor& tensor) { return deferred::owner_of(tensor) != nullptr; }

void materialize(const ModelRef& model, const MaterializeOptions& options) {
  if (options.device && options.device->is_meta()) return materialize_sizes(model);
  const auto targets = targets_of(model);
  for (const auto& [name, tensor, owner] : targets)
    deferred::adopt(tensor, owner.tape->materialize(owner.node, options.device));
  advance_generators(targets);
  if (options.device) model.to(*options.device);
}

void residency::materialize_each(
    const ModelRef& model, const at::Device& device,
    const std::function<void(const std::string& name, const at::Tensor& parameter, at::Tensor value)>& take) {
  const auto targets = targets_of(model);
  if (device.is_meta()) {
    for (const auto& [name, tensor, owner] : targets)
      take(name, tensor, deferred::with_storage(tensor, sizes_of(tensor)));
    return;
  }
  for (const auto& [name, tensor, owner] : targets) {
    {
      const auto kept = owner.tape->kept(owner.node);
      at::Tensor value = deferred::with_storage(tensor, kept ? *kept : owner.tape->value(owner.node, device));
      take(name, tensor, std::move(value));
    }
    owner.tape->hand_over(owner.node);
  }
  advance_generators(targets);
}

}  // namespace accelerate
