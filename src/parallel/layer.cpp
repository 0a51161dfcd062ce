#include "parallel/layer.hpp"

#include <ATen/core/ivalue.h>

#include "accelerate/comm.hpp"
#include "accelerate/utils/error.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

c10::IValue Layer::own_state() const { return {}; }

std::function<void()> Layer::stage_own_state(const c10::IValue&) {
  throw CheckpointError(
      "load_state: the checkpoint has a state of communication hooks, which this model's engine has none of, expected "
      "the DistributedDataParallelKwargs that it was saved with");
}

at::Tensor Layer::widen(const Held&, const at::Tensor&) const {
  throw InternalError("the layer '" + name() + "' does not widen single tensors, expected it to be the last that cuts");
}

void Layer::gather_each(const Engine::ShardOf& piece_of, const std::function<void(const Engine::Whole&)>& take,
                        bool everywhere) const {
  for (const Held& one : held()) {
    const at::Tensor piece = piece_of(one.tensor, one.value);
    const at::Tensor value = piece.defined() ? widen(one, piece) : piece;
    if (everywhere || comm::rank() == 0) take({.name = one.names.front(), .parameter = one.tensor, .value = value});
  }
}

void Layer::offload_states(const StatesToOffload&) {
  raise<ConfigError>(
      "offload_states: found a model that is trained with '{}', expected one that a DeepSpeed configuration splits by "
      "zero_optimization.stage 1, 2 or 3",
      name());
}

void Layer::begin_join() {
  raise<ConfigError>(
      "join_uneven_inputs: found a model that is trained with '{}', which needs all ranks in every step, expected one "
      "trained by averaging alone; let the loader give all ranks the same number of batches (even_batches)",
      name());
}

std::vector<Held> whole_tensors(const NamedTensors& parameters) {
  std::vector<Held> all;
  for (const auto& [name, tensor] : parameters)
    all.push_back(
        {.names = {name}, .tensor = tensor, .whole = tensor, .value = tensor, .slice = Slice::all_of(tensor.sizes())});
  return all;
}

}  // namespace accelerate::parallel
