#pragma once

/// Models that Python compiled ahead of time: torch._inductor.aoti_compile_and_package writes an exported model with
/// its weights and native code into one file, which needs no Python any more.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A model for inference, which goes through Accelerator::prepare like any other. It has no parameters to train: its
/// weights are inside, on the device and in the dtypes that it was compiled for, and autocast changes nothing in it.
/// Calls are safe from several threads, and wait for each other.
class ACCELERATE_API CompiledModelImpl : public torch::nn::Module {
 public:
  /// Opens a package ("model.pt2") and runs its native code: open only files that you trust. Takes room in the folder
  /// for temporary files while it lives. Programs with this class begin with AOTI_RUNTIME_CHECK_INPUTS=1, unless it
  /// is set: without it compiled code reads inputs of other shapes as if they were right.
  /// @param name  which of the models in the package
  /// @throws CheckpointError when there is no such file or model, or it is damaged or for another machine;
  ///         ConfigError when it is for a device that is not here.
  explicit CompiledModelImpl(const std::filesystem::path& package, const std::string& name = "model");
  ~CompiledModelImpl() override;

  /// @param inputs  the tensors among the arguments of the exported model, depth first; dtypes, sizes and strides as it
  ///                was exported, on its device
  /// @return the tensors of its result, depth first; none of them requires a gradient
  /// @throws ShapeError for inputs of another number or kind; ConfigError where a gradient of them would be wanted.
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs);
  /// The same for models whose result is one tensor. @throws ShapeError where it is not.
  template <std::same_as<at::Tensor>... Tensors> at::Tensor forward(const at::Tensor& first, const Tensors&... rest) {
    return only(forward(std::vector<at::Tensor>{first, rest...}));
  }
  /// The metadata of the package, such as AOTI_DEVICE_KEY.
  std::map<std::string, std::string> metadata() const;

 private:
  struct Impl;
  at::Tensor only(const std::vector<at::Tensor>& outputs) const;
  std::unique_ptr<Impl> impl_;
};

/// As TORCH_MODULE makes it, but for the call: LibTorch's holders know no forward that has several forms.
class CompiledModel : public torch::nn::ModuleHolder<CompiledModelImpl> {
 public:
  using torch::nn::ModuleHolder<CompiledModelImpl>::ModuleHolder;
  using Impl = CompiledModelImpl;
  template <class... Inputs> auto operator()(const Inputs&... inputs) { return get()->forward(inputs...); }
};

}  // namespace accelerate
