#include "parallel/gradients.hpp"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "accelerate/comm.hpp"
#include "residency/disk/by_turns.hpp"

namespace accelerate::parallel {
namespace {

/// The norm of all elements together; in fp32 at least. 0 for none. Empty shards have none, also for the infinity norm.
at::Tensor norm_of_all(const std::vector<at::Tensor>& tensors, double norm_type, const at::Device& device) {
  std::vector<at::Tensor> some, low;
  for (const auto& tensor : tensors)
    if (tensor.numel() > 0)
      (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16 ? low : some).push_back(tensor);
  if (some.empty() && low.empty()) return at::zeros({}, at::TensorOptions().device(device));
  std::vector<at::Tensor> norms(some.size() + low.size());
  residency::by_turns(some, /*changes=*/false, [&](const auto& here, const auto& numbers) {
    const auto found = at::_foreach_norm(here, norm_type);
    for (size_t i = 0; i < found.size(); ++i) norms[numbers[i]] = found[i];
  });
  residency::by_turns(low, /*changes=*/false, [&](const auto& here, const auto& numbers) {
    const auto found = at::_foreach_norm(here, norm_type, at::kFloat);
    for (size_t i = 0; i < found.size(); ++i) norms[some.size() + numbers[i]] = found[i];
  });
  for (auto& norm : norms) norm = norm.to(norms.front().device());  // a model may lie on several devices
  return at::linalg_vector_norm(at::stack(norms), norm_type);
}

}  // namespace

void Gradients::scale(const at::Scalar& factor) const {
  change([&](const auto& some) { at::_foreach_mul_(some, factor); });
}

void Gradients::scale(const at::Tensor& factor) const {
  // What need not change is not written. On all ranks alike: who shows what was changed gathers it anew.
  if (factor.is_cpu() && factor.item<double>() == 1) return;
  change([&](const auto& some) { at::_foreach_mul_(some, factor); });
}

void Gradients::change(const std::function<void(const std::vector<at::Tensor>&)>& f) const {
  const auto use = [&](const auto& some, const auto&) { f(some); };
  residency::by_turns(whole, /*changes=*/true, use);
  residency::by_turns(pieces, /*changes=*/true, use);
}

Gradients gradients_of(const Engines& engines, const std::vector<at::Tensor>& parameters) {
  Gradients found;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& parameter : parameters) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    std::optional<Held> piece;
    for (const auto& engine : engines)
      if (engine && (piece = engine->gradient(parameter))) break;
    if (!piece) {
      if (parameter.grad().defined()) found.whole.push_back(parameter.grad());
    } else if (piece->value.defined()) {
      found.pieces.push_back(piece->value);
      const bool apart = piece->engine->apart().has_value();
      if (piece->counts(apart ? comm::Axes{comm::Axis::dp_replicate} : comm::Axes{}))
        found.counted.push_back(piece->value);
    }
  }
  return found;
}

std::unordered_set<const at::TensorImpl*> stepped_for(const Engines& engines,
                                                      const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const at::TensorImpl*> stepped;
  for (const auto& parameter : parameters) stepped.insert(parameter.unsafeGetTensorImpl());
  for (const auto& engine : engines) {
    if (!engine) continue;
    for (const auto& held : engine->pieces())
      if (stepped.contains(held.tensor.unsafeGetTensorImpl())) stepped.insert(held.value.unsafeGetTensorImpl());
  }
  return stepped;
}

at::Tensor norm_of(const Gradients& gradients, const Engines& engines, double norm_type, const at::Device& device) {
  const auto& [whole, pieces, counted] = gradients;
  const bool shared = comm::world_size() > 1 && std::any_of(engines.begin(), engines.end(), [](const auto& engine) {
                        return engine && engine->holds_pieces();
                      });
  if (whole.empty() && pieces.empty() && !shared) return at::zeros({});
  const at::Device where = !whole.empty() ? whole.front().device() : !pieces.empty() ? pieces.front().device() : device;
  // A rank that counts nothing must bring the others' dtype.
  const auto type =
      pieces.empty() ? at::kFloat : c10::toRealValueType(at::promote_types(pieces.front().scalar_type(), at::kFloat));
  at::Tensor total = norm_of_all(counted, norm_type, where).to(type);
  if (shared) {
    // The norm of the whole from the norms of its shards.
    const bool largest = std::isinf(norm_type);
    // Replicas that train apart have norms of their own: each has its place in the sum.
    std::optional<int64_t> replica;
    for (const auto& engine : engines)
      if (engine && engine->holds_pieces() && engine->apart()) replica = engine->apart();
    at::Tensor parts = (largest ? total : total.pow(norm_type)).view({1}).to(device);
    if (replica) {
      at::Tensor all = at::zeros({comm::world_size()}, parts.options());
      all.narrow(0, *replica, 1).copy_(parts);
      parts = all;
    }
    const at::Tensor sum = comm::agreed::all_reduce(parts, largest ? Reduction::max : Reduction::sum, 1.0)
                               .select(0, replica.value_or(0))
                               .to(where);
    total = largest ? sum : sum.pow(1.0 / norm_type);
  }
  if (whole.empty()) return total;
  const at::Tensor of_whole = norm_of_all(whole, norm_type, where);
  return pieces.empty() && !shared ? of_whole : at::linalg_vector_norm(at::stack({total, of_whole}), norm_type);
}

}  // namespace accelerate::parallel
