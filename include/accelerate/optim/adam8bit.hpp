#pragma once

/// AdamW and Adam whose states take a byte per element each instead of four: bitsandbytes' blockwise 8-bit optimizers.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "accelerate/optim/own_state_dict.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::optim {

/// bitsandbytes' defaults.
struct ACCELERATE_API AdamW8bitOptions : torch::optim::OptimizerCloneableOptions<AdamW8bitOptions> {
  explicit AdamW8bitOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr) = 1e-3;
  using betas_t = std::tuple<double, double>;
  TORCH_ARG(betas_t, betas) = {0.9, 0.999};
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled: a step first multiplies the parameter by 1 - lr * weight_decay.
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// Parameters with fewer elements have states in fp32, as they take little memory and are often the sensitive ones
  /// (norms, biases). A state that exists, or is loaded, stays what it is.
  TORCH_ARG(int64_t, min_8bit_size) = 4096;
  /// States of parameters with 100000 elements or more live outside of the memory that the model needs, and come in for
  /// their parameter's step only: for parameters on a device in the host's memory, unless paging_folder names a folder;
  /// for those on the CPU in a file, whose pages leave this process's memory after the step (and the system's, when it
  /// has written them; a folder that is itself in memory, tmpfs, gains nothing). All values stay as they are unpaged.
  TORCH_ARG(bool, paged) = false;
  /// The folder of that file, which has no name and goes with the states. Default: the system's folder for temporary
  /// files. With `paged` only.
  TORCH_ARG(std::string, paging_folder) = {};

 public:
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

/// bitsandbytes' PagedAdamW8bit.
struct ACCELERATE_API PagedAdamW8bitOptions : AdamW8bitOptions {
  explicit PagedAdamW8bitOptions(double lr = 1e-3) : AdamW8bitOptions(lr) { paged(true); }
};

/// bitsandbytes' Adam8bit is its AdamW8bit without weight decay by default; the decay is decoupled there, too.
struct ACCELERATE_API Adam8bitOptions : AdamW8bitOptions {
  explicit Adam8bitOptions(double lr = 1e-3) : AdamW8bitOptions(lr) { weight_decay(0); }
};

/// States are codes of 8 bits in blocks of 256 elements with a scale each, decoded, stepped and encoded again with each
/// step, 131072 elements at a time; all arithmetic is in fp32. Each value becomes the nearest of the map, but a second
/// moment is zero only if it was: else an element of a small gradient would next be divided by eps alone. So a
/// parameter that gets no gradients stays where it is. (bitsandbytes 0.50 rounds to a coarser grid first on CPUs, in
/// which what is zero becomes 1.5e-5 of the block's largest.) Parameters: fp32, fp16 or bf16, dense. Source:
/// arXiv:2110.02861; arithmetic to the bit, and files, as bitsandbytes 0.50.
class ACCELERATE_API AdamW8bit : public torch::optim::Optimizer, public OwnStateDict {
 public:
  /// Options of a group act where they differ from AdamW8bitOptions' defaults (an Adam8bitOptions' weight_decay of 0
  /// does); the rest is taken from `defaults`. So LibTorch's own optimizers do it.
  /// @throws ConfigError for options out of range or of another class, for parameters in fp64, and for a paging_folder
  /// without `paged` or that is none; ResourceError, here or in the first step, where no file can be made in it or the
  /// disk is full.
  explicit AdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     const AdamW8bitOptions& defaults = AdamW8bitOptions());
  explicit AdamW8bit(std::vector<at::Tensor> params, const AdamW8bitOptions& defaults = AdamW8bitOptions())
      : AdamW8bit({torch::optim::OptimizerParamGroup(std::move(params))}, defaults) {}

  /// Takes the place of Optimizer's, which knows the options of LibTorch's classes only. @throws as the constructor,
  /// and adds nothing then.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// @throws ConfigError for a sparse gradient, before anything is changed.
  at::Tensor step(LossClosure closure = nullptr) override;

  /// bitsandbytes' layout, under names of its own so that PyTorch leaves the codes alone: {"state": {0: {"step": 3,
  /// "__bnb_optimizer_quant_state__": {"state1": uint8 like the parameter, "qmap1": fp32 [256], "absmax1": fp32
  /// [blocks], "state2": …}}}, "param_groups": […]}. States in fp32 have no qmap and absmax.
  c10::IValue state_dict() const override;
  /// Also reads the layout without the inner dict, of older versions. States of bitsandbytes that we have no
  /// counterpart for are refused by name: those of block_wise=False ("max1", …), percentile_clipping ("gnorm_vec"),
  /// max_unorm ("unorm_vec"), and maps other than the dynamic ones. So are options out of range and negative steps.
  void load_state_dict(const c10::IValue& state) override;
  void map_state(const std::function<at::Tensor(const at::Tensor&)>& f) override;

  /// torch::save and torch::load of LibTorch, which have no layout for it: a ConfigError says what to use.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Pages;
  std::shared_ptr<Pages> pages_;  ///< files of paged states, by folder
};

/// AdamW8bit with `paged`, by bitsandbytes' name. (There it pages between a GPU and the host; on CPUs it does not.)
class ACCELERATE_API PagedAdamW8bit : public AdamW8bit {
 public:
  explicit PagedAdamW8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          const AdamW8bitOptions& defaults = PagedAdamW8bitOptions())
      : AdamW8bit(groups, AdamW8bitOptions(defaults).paged(true)) {}
  explicit PagedAdamW8bit(std::vector<at::Tensor> params, const AdamW8bitOptions& defaults = PagedAdamW8bitOptions())
      : AdamW8bit(std::move(params), AdamW8bitOptions(defaults).paged(true)) {}
};

class ACCELERATE_API Adam8bit : public AdamW8bit {
 public:
  explicit Adam8bit(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    const AdamW8bitOptions& defaults = Adam8bitOptions())
      : AdamW8bit(groups, defaults) {}
  explicit Adam8bit(std::vector<at::Tensor> params, const AdamW8bitOptions& defaults = Adam8bitOptions())
      : AdamW8bit(std::move(params), defaults) {}
};

}  // namespace accelerate::optim
