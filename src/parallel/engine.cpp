#include "accelerate/parallel/engine.hpp"

#include <ATen/core/ivalue.h>

#include "accelerate/utils/error.hpp"

namespace accelerate::parallel {

std::optional<Held> Engine::gradient(const at::Tensor&) const { return std::nullopt; }

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

c10::IValue Engine::own_state() const { return {}; }

std::function<void()> Engine::stage_own_state(const c10::IValue&) {
  throw CheckpointError(
      "load_state: the checkpoint has a state of communication hooks, which this model's engine has none of, expected "
      "the DistributedDataParallelKwargs that it was saved with");
}

}  // namespace accelerate::parallel
