#pragma once

/// Pipeline inference of a model as it is, over several processes:
///
///     auto model = accelerate::models::GPT2LMHeadModel(config);  // on every rank
///     auto pipeline = accelerate::prepare_pippy(model, {.gather_output = true}, example_ids);
///     auto logits = pipeline(ids);                               // on every rank; rank 0's ids count
///
/// Each rank holds a stage of the model and runs the whole forward; operators of other stages give sizes only, and a
/// tensor is sent when an operator of another stage first uses it. So the model needs no rewriting: skip connections,
/// tied weights, loops over layers and results of any structure are ordinary. docs/pipeline_inference.md says what a
/// forward must not do. Source: reference documentation of prepare_pippy; GPipe, arXiv:1811.06965.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/parallel/pipeline.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate {

namespace detail {
/// Types without tensors that nobody finds: a struct that declares no ACCELERATE_FIELDS would hide its own.
template <class T>
struct IsTransparent : std::bool_constant<nested::TensorLike<T> || nested::IValueLike<T> || std::is_arithmetic_v<T> ||
                                          std::is_enum_v<T> || std::is_same_v<T, std::string>> {};
}  // namespace detail

/// Cheap-to-copy handle; copies share the pipeline. `p(...)` is the model's forward without gradients.
///
/// Collective: all ranks call it with arguments of the same types. Tensors of rank 0's arguments are everyone's; others
/// may pass undefined ones in their place. Other arguments should be equal on all ranks. Tensors with as many rows as
/// the first one are cut along dimension 0, in parts as equal as can be (the reference pads instead); the rest goes to
/// each part whole. Results are joined along dimension 0. With one process it is the plain forward.
/// Parameters of other stages are on the meta device.
template <ModelLike Model> class PipelinedModel : public Callable<PipelinedModel<Model>, Model> {
 public:
  PipelinedModel(Model model, std::shared_ptr<parallel::Pipeline> core)
      : Callable<PipelinedModel<Model>, Model>(std::move(model)), core_(std::move(core)) {}

  /// @throws ConfigError naming the operator when the forward can't be split; CommError when a rank fails or runs
  /// another program, on all ranks.
  template <class... Args> auto forward(const Args&... args) const {
    using Output = std::decay_t<decltype(own_forward(args...))>;
    static_assert(nested::all_leaves<Output, detail::IsTransparent>,
                  "the forward returns a type whose tensors can't be found: use tensors, numbers, strings, standard "
                  "containers of them, or declare ACCELERATE_FIELDS in your struct");
    const at::NoGradGuard no_grad;
    if (core_->num_stages() == 1) return Output(own_forward(args...));
    const std::tuple<std::decay_t<const Args&>...> inputs(args...);
    std::vector<at::Tensor> tensors;
    nested::for_each_tensor(inputs, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
    parallel::PipelineCall run(*core_, tensors);
    std::vector<Output> outputs;
    for (int64_t chunk = 0; chunk < run.num_chunks(); ++chunk) {
      const auto part = nested::map_tensors(inputs, [&](const at::Tensor&) { return run.next_input(); });
      run.run([&] {
        outputs.push_back(std::apply([&](const auto&... items) -> Output { return own_forward(items...); }, part));
      });
      outputs.back() = nested::map_tensors(outputs.back(), [&](const at::Tensor& tensor) { return run.take(tensor); });
    }
    run.finish();
    std::vector<const Output*> parts;
    for (const Output& output : outputs) parts.push_back(&output);
    const Output joined =
        nested::combine_tensors<Output>(parts, [&](const std::vector<at::Tensor>& items) { return run.join(items); });
    return nested::map_tensors(joined, [&](const at::Tensor& tensor) { return run.deliver(tensor); });
  }

  PipelineReport report() const { return core_->report(); }
  const std::vector<std::string>& split_points() const { return core_->split_points(); }

 private:
  /// Without hooks, which would see each chunk.
  template <class... Args> decltype(auto) own_forward(const Args&... args) const {
    return call_forward(this->model(), args...);
  }

  std::shared_ptr<parallel::Pipeline> core_;
};

/// Makes one stage per process of a model that every rank has built alike, with its weights or without
/// (init_empty_weights: only this rank's stage is materialised). Afterwards a rank holds the parameters of its stage,
/// and those of others that it uses too (tied weights).
///
/// Needs a PartialState or an Accelerator. Collective. Put the model into evaluation mode first.
/// @param example  arguments of the forward. With them the forward is run once for sizes, so that stages follow its
/// order and not that of registration, weights that several stages use stay with all of them,
///                 and a forward that can't be split is an error here already.
/// @throws ConfigError, ShapeError and CommError as parallel::Pipeline.
template <ModelLike Model, class... Example>
PipelinedModel<Model> prepare_pippy(Model model, const PippyOptions& options = {}, const Example&... example) {
  std::function<void()> forward;
  if constexpr (sizeof...(Example) > 0) forward = [&] { static_cast<void>(call_forward(model, example...)); };
  auto core = std::make_shared<parallel::Pipeline>(model, options, forward);
  return PipelinedModel<Model>(std::move(model), std::move(core));
}

}  // namespace accelerate
