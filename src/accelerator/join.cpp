#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "accelerate/utils/archive.hpp"
#include "accelerator/accelerator_impl.hpp"
#include "accelerator/join.hpp"
#include "comm/group.hpp"
#include "comm/mesh.hpp"
#include "parallel/join.hpp"
#include "utils/log.hpp"
#include "utils/raise.hpp"

namespace accelerate {

double items_of_all_ranks(double items, const at::Device& device) {
  const auto group = comm::mesh().along(comm::kTokens);
  if (!group) return items;
  const auto options = at::TensorOptions().dtype(at::kDouble).device(device.is_mps() ? at::Device(at::kCPU) : device);
  at::Tensor sum = at::full({1}, items, options);
  group->all_reduce_(sum, Reduction::sum);
  return sum.item<double>();
}

namespace {

/// Everyone in the group gets the list of its rank `source`.
void broadcast_list(comm::Group& group, std::vector<c10::IValue>& list, int64_t source) {
  list = from_bytes<std::vector<c10::IValue>>(comm::broadcast_bytes(group, to_bytes(list), source));
}

}  // namespace

bool share_state(const AcceleratedOptimizer& optimizer, comm::Group& group, int64_t source) {
  std::vector<c10::IValue> state(1);
  try {
    // On the host: devices have other numbers on other ranks.
    if (group.rank() == source) state[0] = optimizer.state_dict().deepcopy(at::kCPU);
  } catch (const ConfigError&) {
    // The others learn of it by getting none.
  }
  broadcast_list(group, state, source);
  if (state[0].isNone()) return false;
  if (group.rank() != source) optimizer.load_state_dict(state[0]);
  return true;
}

namespace {

/// Ranks that ended early stood still while others went on: they take the others' states, so that all step alike
/// from here on. Parameters and buffers have been taken by the engines.
/// @param source  a rank of the group
/// @param device  where the ranks' losses are
void take_over_run(run_state::RunState& run, comm::Group& group, int64_t source, const at::Device& device) {
  const bool ours = group.rank() == source;
  for (size_t i = 0; i < run.optimizers.size(); ++i)
    if (!share_state(run.optimizers[i], group, source) && ours)
      logs::warn("accelerate.accelerator",
                 "join_uneven_inputs: ranks ended after different numbers of steps, and what prepared optimizer {} has "
                 "learned in them (momentum, say) can't be given to those that ended early, because its class has no "
                 "state_dict(): their next steps may differ. Derive it from optim::OwnStateDict, too.",
                 i);
  std::vector<c10::IValue> rest;
  for (const auto& schedule : run.schedulers) rest.push_back(schedule.state_dict());
  if (run.scaler) {
    rest.push_back(run.scaler->state_dict());
    rest.emplace_back(run.scaler->has_checked());
  }
  rest.emplace_back(run.step);
  broadcast_list(group, rest, source);
  size_t next = 0;
  for (const auto& schedule : run.schedulers) {
    if (!ours) schedule.load_state_dict(rest[next]);
    ++next;
  }
  // Also where it comes from: it has counted the last step there, which would wait for the next loss.
  if (run.scaler) {
    run.scaler->load_state_dict(rest[next++]);
    // A rank that had no step at all: its gradients are of losses that the others have scaled.
    if (rest[next++].toBool() && !run.scaler->has_checked())
      run.scaler->scale(at::zeros({}, at::TensorOptions().device(device)));
  }
  run.step = rest[next].toInt();
}

}  // namespace

void Accelerator::join(const parallel::Engines& models, const std::function<void()>& loop,
                       std::optional<bool> even_batches) {
  // A rank without data runs no forwards, of which scales would be the maximum over all ranks.
  for (const auto& model : impl_->run.models)
    if (use_distributed() && model->fp8 && model->engine && remembers_scales(impl_->fp8.recipe) &&
        std::find(models.begin(), models.end(), model->engine) != models.end())
      throw ConfigError(
          "join_uneven_inputs: the model computes in fp8 with scales from the past (TERecipeKwargs), which ranks "
          "agree on in each forward, expected as many batches on each rank; use AORecipeKwargs, whose scales are of "
          "each tensor as it is now, or give the ranks equal numbers of batches (even_batches)");
  // The setting returns even when the loop throws.
  Scope restore;
  if (even_batches) {
    int64_t overridden = 0;
    for (const auto& loader : impl_->run.loaders) overridden += loader->override_even_batches(even_batches);
    const auto others = static_cast<int64_t>(impl_->run.loaders.size()) - overridden;
    if (overridden > 0 && others > 0 && is_main_process() && use_distributed())
      logs::warn("accelerate.accelerator",
                 "join_uneven_inputs: even_batches was given, and {} of {} prepared loaders keep what they have: they "
                 "read streams, or rank 0 dispatches their batches, where it does not apply",
                 others, impl_->run.loaders.size());
    if (overridden == 0 && use_distributed())
      throw ConfigError(
          "join_uneven_inputs: even_batches was given, but no prepared loader reads a map-style data set without "
          "dispatching, the only kind that it applies to; leave it out");
    restore = Scope([loaders = impl_->run.loaders] {
      for (const auto& loader : loaders) loader->override_even_batches(std::nullopt);
    });
  }
  const auto& scaler = impl_->run.scaler;
  const bool tokens = gradient_state().average() == GradientAverage::tokens;
  if (tokens && models.size() > 1 && use_distributed())
    throw ConfigError(
        "join_uneven_inputs: gradients of several models are averaged over tokens (GradientAverage::tokens), expected "
        "one model: a rank without data answers how many items it has once for each model's step, and backward asks "
        "once for all of them; use GradientAverage::steps, or let the loader give all ranks the same number of batches "
        "(even_batches)");
  // Gradients are those of all ranks, so that each sees by itself whether they overflowed, and one without data need
  // not be asked.
  if (scaler) scaler->set_agreement(false);
  const Scope agree([scaler] {
    if (scaler) scaler->set_agreement(true);
  });
  const auto source = parallel::join(models, loop, [&](bool averages) {
    if (tokens && averages) items_of_all_ranks(0, device());
  });
  if (source) take_over_run(impl_->run, *comm::mesh().along(comm::kTokens), *source, device());
}

}  // namespace accelerate
