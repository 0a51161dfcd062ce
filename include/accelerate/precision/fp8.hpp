#pragma once

/// Training with products in 8-bit floating point, on unmodified models: while an FP8Scope is open on a thread,
/// products with the model's weights (linear, addmm, matmul, mm with a whole parameter or its transpose) are computed
/// from fp8 codes of input and weight, and their backward from fp8 codes of the gradient. On CPUs, and GPUs before
/// sm_89, that is emulated exactly (codes are decoded, products accumulate in fp32); from sm_89 on at::_scaled_mm
/// computes.
///
///     FP8Training training({.backend = FP8Backend::te}, model);   // once, after prepare
///     for (auto& batch : loader) {
///       at::Tensor loss;
///       {
///         FP8Scope scope(training, {.training = model->is_training()});  // around the forward only
///         loss = f(model->forward(batch));
///         scope.finish();                   // update of the forward scales (collective if world > 1 and delayed)
///       }
///       loss.backward();
///       training.after_backward();          // update of the gradients' scales (same)
///     }
///
/// Numbers: docs/fp8.md.

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The library whose recipe it is: Transformer Engine's, torchao's or MS-AMP's (deprecated).
enum class FP8Backend { te, ao, msamp };
/// hybrid: E4M3 for weights and activations, E5M2 for gradients.
enum class FP8Format { hybrid, e4m3, e5m2 };
enum class AmaxComputeAlgo { most_recent, max };
/// torchao's recipes: one scale per tensor; one per row; per row with the weight's gradient in high precision.
enum class AORecipe { tensorwise, rowwise, rowwise_with_gw_hp };
enum class MSAMPOptLevel { O1, O2 };

/// All settings of fp8 training. Fields below a back-end's name act with that back-end only; validate() refuses others
/// that differ from their default.
struct FP8Recipe {
  FP8Backend backend = FP8Backend::te;

  // te
  /// Scales are 2^margin smaller than the last amax asks for. Delayed scaling only.
  int64_t margin = 0;
  /// Scales are worked out at every so many updates, of which one that has seen nothing is none; histories roll at
  /// each. Delayed scaling only. At least 1.
  int64_t interval = 1;
  FP8Format fp8_format = FP8Format::hybrid;
  /// Entries of the amax history, at least 1.
  int64_t amax_history_len = 1024;
  AmaxComputeAlgo amax_compute_algo = AmaxComputeAlgo::most_recent;
  /// {fprop, dgrad, wgrad}: compute that product in high precision.
  std::array<bool, 3> override_linear_precision{false, false, false};
  /// fp8 in evaluation too (a scope that is opened with training = false).
  bool use_autocast_during_eval = false;
  /// MXFP8 instead of delayed scaling: blocks of 32 with a power-of-two scale, numbers as fp8_format says; no state.
  bool use_mxfp8_block_scaling = false;
  /// Extension: scales from the tensor itself instead of history (Transformer Engine's Float8CurrentScaling); no state.
  bool use_current_scaling = false;

  // ao
  AORecipe config = AORecipe::tensorwise;
  /// Unset: all but the model's first and last linear weight. Asked once per weight [outputs, inputs] or its transpose,
  /// by the parameter's name without ".weight".
  std::function<bool(const std::string& module, const at::Tensor& weight)> module_filter_func;
  /// Pad the inner dimension of products to a multiple of 16; without it others are refused when they come.
  bool pad_inner_dim = true;
  /// Gather weights in fp8 with FSDP version 2. Acts in FSDP's gather.
  bool enable_fsdp_float8_all_gather = true;

  // msamp
  MSAMPOptLevel opt_level = MSAMPOptLevel::O2;

  /// @throws ConfigError naming the first field that is out of range or belongs to another back-end.
  void validate() const;
};

/// The scaling state of one weight. Delayed scaling only.
struct FP8Scaling {
  at::Tensor scale;         ///< fp32 [3]: input, weight, output; or [2]: grad_output, grad_input
  at::Tensor amax_history;  ///< fp32 [amax_history_len, 3 or 2]; row 0 is what was seen since the last update
};

struct FP8ScopeOptions {
  /// The model trains; false is evaluation, where scopes do nothing unless use_autocast_during_eval.
  bool training = true;
  /// Weights' codes: true: make them now, and keep them. false: use those that are kept (the weights have not changed
  /// since). Unset: they are made again wherever weight or scale have changed.
  std::optional<bool> is_first_microbatch;
};

/// The state of fp8 training of one model. It must outlive its scopes, and the backward passes of the forwards in them.
/// Not thread-safe; forward and backward of one model run one after the other.
class ACCELERATE_API FP8Training {
 public:
  /// Takes part: every 2-D parameter whose sizes are multiples of 16 and that the recipe does not leave out. Holds the
  /// parameters (of FSDP: the members), so it is made after engines have replaced storages, or before: both work.
  /// @throws ConfigError as FP8Recipe::validate.
  FP8Training(FP8Recipe recipe, const ModelRef& model);
  FP8Training(const FP8Training&) = delete;
  FP8Training& operator=(const FP8Training&) = delete;
  ~FP8Training();

  const FP8Recipe& recipe() const;
  /// Names of the weights that take part, in the order of the model's parameters.
  const std::vector<std::string>& weights() const;

  /// Replaces its argument, int32 of one dimension on the weights' device, by the maximum over ranks, element by
  /// element. Called once per update, with the same number of elements on each rank. (The elements are the bits of
  /// amax, which order like the numbers; NaN is largest.) Unset: this process is alone. Set it where world > 1.
  void set_amax_reduction(std::function<void(at::Tensor& bits)> all_reduce_max);

  /// After loss.backward(): updates the gradients' scales. Collective with an amax reduction. Nothing where no
  /// backward of an fp8 product has run on any rank (delayed scaling only; else it does nothing at all and is not
  /// collective). Where nobody calls it the next scope's opening does.
  void after_backward();

  /// Delayed scaling's state by name: "<weight name>.scale_fwd" [3], ".amax_history_fwd" [len, 3], ".scale_bwd" [2],
  /// ".amax_history_bwd" [len, 2], and "updates" int64 [2] (forward, backward), which `interval` counts. Copies, on
  /// the CPU; the same on all ranks after updates. Empty for recipes without state.
  std::map<std::string, at::Tensor> state_dict() const;
  /// @throws CheckpointError naming the entry that is missing, left over, or of another shape; nothing is loaded then.
  /// A history of another length is cut or filled with zeros as Transformer Engine does.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

  /// Products since construction, by kind; for receipts.
  struct Counts {
    int64_t fp8_products = 0;   ///< forward products computed from fp8 codes
    int64_t high_products = 0;  ///< products with a 2-D parameter inside a scope that were left in high precision
    int64_t updates = 0;        ///< of scales
    int64_t weight_encodes = 0, weight_cache_hits = 0;
  };
  Counts counts() const;

 private:
  friend class FP8Scope;
  struct Impl;
  std::shared_ptr<Impl> impl_;  ///< shared with backward nodes and recomputation
};

/// fp8 products on this thread from construction to destruction. Scopes nest: the inner one counts.
class ACCELERATE_API FP8Scope {
 public:
  explicit FP8Scope(FP8Training& training, FP8ScopeOptions options = {});
  FP8Scope(const FP8Scope&) = delete;
  FP8Scope& operator=(const FP8Scope&) = delete;
  /// Only ends it; the update of scales then waits for the next scope, unless finish() did it.
  ~FP8Scope();
  /// Updates the forward scales (delayed scaling, where gradients are enabled) and ends the scope. Collective with an
  /// amax reduction.
  void finish();

 private:
  struct Open;
  std::unique_ptr<Open> open_;
};

}  // namespace accelerate
