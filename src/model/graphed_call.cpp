#include "model/graphed_call.hpp"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <utility>

#include "accelerate/model/submodule.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

/// Whether the tensor carries the key of residency's members, whose bytes have no fixed place; PyTorch itself leaves
/// that key unused.
bool comes_and_goes(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::DeferredInit);
}

std::string kind_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("{} [{}] on {}", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                     tensor.device().str());
}

/// The cache would end with the caller's scope of autocast, and the recording go on reading it.
class WithoutAutocastCache {
 public:
  WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(false); }
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;
  ~WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }

 private:
  const bool before_ = at::autocast::is_autocast_cache_enabled();
};

}  // namespace

GraphedCall::GraphedCall(ModelRef model, Forward forward, const std::vector<at::Tensor>& inputs, Recorder record)
    : model_(std::move(model)), forward_(std::move(forward)), device_(inputs.front().device()) {
  for (const auto& part : model_.submodules())
    if (part.module->is_training())
      raise<ConfigError>("CudaGraphModel: {} is in training mode, expected a model for inference; call module->eval()",
                         part.path.empty() ? part.class_name : fmt::format("{} ('{}')", part.class_name, part.path));
  find_weights();
  const c10::InferenceMode ordinary_tensors(false);
  const c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || inputs[i].device() != device_)
      raise<ShapeError>("CudaGraphModel: input {} is {}, expected a tensor on {}, where the first one is", i,
                        kind_of(inputs[i]), device_.str());
    inputs_.push_back(at::empty_like(inputs[i]).copy_(inputs[i]));
  }
  record_with(record);
}

GraphedCall::~GraphedCall() {
  if (done_) done_->synchronize();
}

void GraphedCall::find_weights() {
  for (const auto& [name, tensor] : model_.state()) {
    if (comes_and_goes(tensor))
      raise<ConfigError>(
          "CudaGraphModel: the bytes of weight '{}' come and go (it is offloaded, sharded, adapted or not "
          "initialised), expected weights that stay where they are; call that model as it is, or make the graph of one "
          "that fits on the device whole",
          name);
    if (tensor.device() != device_)
      raise<ConfigError>(
          "CudaGraphModel: weight '{}' is on {}, expected {}, where the first input is; call module->to(device)", name,
          tensor.device().str(), device_.str());
    weights_.push_back({name, tensor, tensor.const_data_ptr()});
  }
}

void GraphedCall::record_with(Recorder record) {
  const WithoutAutocastCache no_cache;
  recording_ = record(device_, [this] { outputs_ = forward_(inputs_); });
  if (outputs_.empty())
    raise<ShapeError>("CudaGraphModel: the model's result has no tensor, expected one at least; see ACCELERATE_FIELDS");
  for (size_t i = 0; i < outputs_.size(); ++i)
    if (!outputs_[i].defined() || outputs_[i].device() != device_)
      raise<ShapeError>(
          "CudaGraphModel: tensor {} of the model's result is {}, expected all on {}: what other devices do is not "
          "repeated",
          i, kind_of(outputs_[i]), device_.str());
}

void GraphedCall::check_inputs(const std::vector<at::Tensor>& inputs) const {
  if (inputs.size() != inputs_.size())
    raise<ShapeError>("CudaGraphModel: found {} inputs, expected {}, as it was recorded", inputs.size(),
                      inputs_.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor &found = inputs[i], &expected = inputs_[i];
    if (!found.defined() || found.sizes() != expected.sizes() || found.scalar_type() != expected.scalar_type() ||
        found.device() != device_)
      raise<ShapeError>(
          "CudaGraphModel: input {} is {}, expected {} [{}] on {}, as it was recorded; pad it to that, or make a graph "
          "for each kind of inputs",
          i, kind_of(found), c10::toString(expected.scalar_type()), fmt::join(expected.sizes(), ", "), device_.str());
  }
}

void GraphedCall::check_model(const std::vector<at::Tensor>& inputs) const {
  if (model_.module()->is_training())
    raise<ConfigError>(
        "CudaGraphModel: the model is in training mode, but was recorded in eval mode; call module->eval(), or the "
        "model itself");
  const bool gradients = c10::GradMode::is_enabled();
  if (gradients && std::ranges::any_of(inputs, [](const at::Tensor& t) { return t.requires_grad(); }))
    raise<ConfigError>(
        "CudaGraphModel: an input requires a gradient, but a recording has no backward; run it under NoGradGuard, or "
        "call the model itself");
  for (const auto& [name, tensor, data] : weights_) {
    if (gradients && tensor.requires_grad())
      raise<ConfigError>(
          "CudaGraphModel: weight '{}' requires a gradient, but a recording has no backward; run it under NoGradGuard, "
          "or call the model itself",
          name);
    if (tensor.device() != device_ || comes_and_goes(tensor) || tensor.const_data_ptr() != data)
      raise<ConfigError>(
          "CudaGraphModel: weight '{}' is elsewhere than when the graph was recorded, by module->to() or prepare(), "
          "expected it in its place; make a new graph",
          name);
  }
}

std::vector<at::Tensor> GraphedCall::operator()(const std::vector<at::Tensor>& inputs) {
  const std::lock_guard lock(mutex_);
  check_inputs(inputs);
  check_model(inputs);
  const c10::AutoGradMode no_grad(false);
  const auto stream = [this] { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); };
  if (done_) done_->block(stream());
  for (size_t i = 0; i < inputs.size(); ++i) inputs_[i].copy_(inputs[i], /*non_blocking=*/true);
  recording_->replay();
  std::vector<at::Tensor> results;
  for (const auto& output : outputs_) results.push_back(output.clone());
  if (!device_.is_cpu()) {
    if (!done_) done_.emplace(device_.type());
    done_->record(stream());
  }
  return results;
}

}  // namespace accelerate
