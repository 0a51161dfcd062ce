#pragma once

/// Models whose kernels an NVIDIA GPU launches all at once: what torch.cuda.make_graphed_callables is in Python, for
/// inference. Small models and small batches, for which launching takes longer than computing, gain by it.
///
/// Compiled against LibTorch 2.11 and 2.13 for CUDA; has not run on a GPU yet. Where it is tested it repeats
/// recordings of the CPU.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "accelerate/model/callable.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/nested.hpp"

namespace accelerate {

class GraphedCall;

/// A model for inference with inputs of fixed sizes. Its construction runs the model's forward three times on a stream
/// of its own, then once more while the device records it; calls copy their inputs to where it was recorded with, and
/// repeat that. It has no parameters to train, and goes through Accelerator::prepare like any other.
///
/// A call repeats the work of the device, and nothing else: branches, printing, hooks and numbers of the host are those
/// of the recording, and so is autocast. Forwards that wait for the device (item(), nonzero, copies to the host) can't
/// be recorded.
/// - Weights may change in place (load_state_dict): the next call computes with what they are. Moving or converting
///   them (module->to) ends the graph: the next call is an error. The module lives as long as the graph.
/// - Random numbers of the device's default generator go on from call to call, as they do without a graph; other
///   generators can't be recorded. The runs before the recording draw from it, too.
/// - The memory of the recording (what one forward needs, inputs, results) is kept while the graph lives.
/// Calls are safe from several threads and streams, and wait for each other. Each rank makes and calls its own;
/// nothing here communicates, and forwards that do are not tested.
class ACCELERATE_API CudaGraphModelImpl : public torch::nn::Module {
 public:
  /// @param model  a torch::nn module (not a script module, and not what prepare returned) in eval mode, whose weights
  ///               are all on the device of the inputs
  /// @param first, rest  what its forward takes: tensors on one NVIDIA GPU. Their values don't matter, unless forward
  ///               looks at them; no other work of this thread may be under way for the recording's duration
  /// @throws NotBuiltError where this build has no CUDA; ConfigError for a model in training mode, with weights
  ///         elsewhere, or that come and go (offloaded, sharded, adapted or not initialised: residency's), and when its
  ///         forward can't be recorded; ShapeError when its result has no tensor, or one that is elsewhere.
  template <ModelLike Model, std::same_as<at::Tensor>... Rest>
  requires(!detail::ScriptModule<Model>)
      CudaGraphModelImpl(const Model& model, const at::Tensor& first, const Rest&... rest)
      : CudaGraphModelImpl(ModelRef(model), forward_of<1 + sizeof...(Rest)>(model), {first, rest...}) {}
  ~CudaGraphModelImpl() override;

  /// @param inputs  as many as were recorded, each of that one's sizes, dtype and device; strides may differ
  /// @return the tensors of the model's result, depth first, as copies of their own: the next call does not change
  ///         them. None of them requires a gradient. Does not wait for the device.
  /// @throws ShapeError for inputs of another number or kind; ConfigError where a gradient of inputs or weights would
  ///         be wanted (gradients are on), the model is in training mode by now, or its weights have moved.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);
  /// The same for models whose result is one tensor. @throws ShapeError where it is not.
  template <std::same_as<at::Tensor>... Tensors> at::Tensor forward(const at::Tensor& first, const Tensors&... rest) {
    return only(forward(std::vector<at::Tensor>{first, rest...}));
  }

 private:
  using Forward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

  template <size_t kInputs, class Model> static Forward forward_of(Model model) {
    return [model = std::move(model)](const std::vector<at::Tensor>& inputs) mutable {
      const auto result = [&]<size_t... I>(std::index_sequence<I...>) { return call(model, inputs[I]...); }
      (std::make_index_sequence<kInputs>{});
      std::vector<at::Tensor> tensors;
      nested::for_each_tensor(result, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
      return tensors;
    };
  }
  CudaGraphModelImpl(const ModelRef& model, Forward forward, const std::vector<at::Tensor>& inputs);
  at::Tensor only(const std::vector<at::Tensor>& outputs) const;

  std::unique_ptr<GraphedCall> graph_;
};
TORCH_MODULE(CudaGraphModel);

}  // namespace accelerate
