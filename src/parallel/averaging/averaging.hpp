#pragma once

/// Data parallelism: every rank holds the whole model, gradients are averaged during backward by c10d's Reducer.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "parallel/layer.hpp"

namespace accelerate::parallel {

/// Knows a model only by its tensors. The model's forward runs between before_forward() and after_forward(). Gradients
/// of a forward that did not (the module's own was called) are averaged too: the first one that arrives makes up for
/// it, and after_backward() for the buffers, which then follow rank 0's behind the backward.
///
/// Which parameters require a gradient may change between steps, on all ranks alike: the next forward (or
/// Accelerator::backward) follows. Bytes that were replaced (torch::load, module->to, set_data) are a ConfigError there
/// where gradients would not be averaged any more.
///
/// All ranks construct it with the same parameters in the same order; the constructor is collective and gives every
/// rank rank 0's values, and lets stand-ins among what layers before it have left (`given`) agree.
/// @throws ShapeError naming the first parameter whose name, shape or dtype differs between ranks (on every rank),
/// CommError. Source: PyTorch DDP (arXiv:2006.15704); reference documentation of DistributedDataParallelKwargs.
class ACCELERATE_API Averaging final : public Layer {
 public:
  Averaging(NamedTensors parameters, const NamedTensors& buffers, const DistributedDataParallelKwargs& kwargs,
            const std::vector<Held>& given);
  ~Averaging() override;

  std::string name() const override { return "averaging"; }

  /// Broadcasts buffers when due and readies the Reducer.
  void before_forward() override;
  /// `outputs`: the tensors of the model's result, through which unused parameters are found.
  void after_forward(const std::vector<at::Tensor>& outputs) override;
  /// `loss` is where unused parameters are looked for after a forward of the module's own.
  void before_backward(const at::Tensor& loss) override;
  void after_backward() override;

  bool averages(const at::Tensor& parameter) const override;

  bool require_backward_grad_sync() const override;
  void set_require_backward_grad_sync(bool value) override;
  void prepare_backward_sync() override;
  void resume_accumulation() override;
  void settle_gradients() override;

  /// Each rank is a replica.
  void set_apart(bool apart) override;
  std::optional<int64_t> apart() const override;
  comm::Group* replicas() const override;
  /// The errors of compressed gradients, and the parameters of each bucket.
  std::string state_name() const override { return "gradients"; }
  c10::IValue own_state() const override;
  std::function<void()> stage_own_state(const c10::IValue& state) override;
  bool shares_buffers() const override;
  void set_shares_buffers(bool value) override;

  /// Ranks may join: one without data adds zeros to the others' averages.
  void begin_join() override;
  void end_join() noexcept override;
  std::optional<bool> shadow_step() override;
  void finish_join(int64_t source) override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::parallel
