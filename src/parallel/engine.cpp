#include "accelerate/parallel/engine.hpp"

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_strided.h>

#include "accelerate/utils/error.hpp"
#include "parallel/stretch.hpp"

namespace accelerate::parallel {

std::optional<PieceGradient> Engine::gradient(const at::Tensor&) const { return std::nullopt; }

void Engine::gather_each(const PieceOf&, const std::function<void(const Whole&)>&, bool) const {}

void Engine::begin_join() {
  throw ConfigError(
      "join_uneven_inputs: found a model with sharded parameters, expected one trained by DistributedDataParallel: "
      "a rank without data would have to take part in every gather; "
      "let the loader give all ranks the same number of batches (even_batches)");
}

void Engine::finish_join(int64_t) {}

void Engine::set_apart(bool) {
  throw ConfigError(
      "LocalSGD: the ranks hold one replica of the model together, expected several that can train apart: data "
      "parallelism, or FSDP with HYBRID_SHARD (dp_replicate_size)");
}

void Engine::average_replicas(const std::vector<at::Tensor>&) const {}

c10::IValue Engine::own_state() const { return {}; }

std::function<void()> Engine::stage_own_state(const c10::IValue&) {
  throw CheckpointError(
      "load_state: the checkpoint has a state of communication hooks, which this model's engine has none of, expected "
      "the DistributedDataParallelKwargs that it was saved with");
}

at::Tensor stretch_of(const at::Tensor& like, const at::Tensor& value, int64_t begin, int64_t numel) {
  at::Tensor ordered = value.detach();
  if (!like.is_non_overlapping_and_dense()) {
    ordered = ordered.contiguous();
  } else if (ordered.strides() != like.strides()) {
    ordered = at::empty_strided(like.sizes(), like.strides(), value.options().requires_grad(false));
    ordered.copy_(value);
  }
  return ordered.as_strided({ordered.numel()}, {1}).narrow(0, begin, numel);
}

at::Tensor piece_of(const Holding& holding, const at::Tensor& whole) {
  const at::Tensor& piece = holding.piece;
  if (piece.numel() == 0) return whole.new_empty(piece.sizes());
  const auto& corner = holding.place.corner;
  if (corner.empty()) return stretch_of(holding.tensor, whole, holding.place.begin, piece.numel()).clone();
  at::Tensor box = whole.detach();
  for (size_t dim = 0; dim < corner.size(); ++dim) {
    const auto d = static_cast<int64_t>(dim);
    box = box.narrow(d, corner[dim], piece.size(d));
  }
  return box.clone(at::MemoryFormat::Contiguous);
}

}  // namespace accelerate::parallel
