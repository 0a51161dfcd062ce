#pragma once

/// The reference's handle on the engine that trains a model under DeepSpeed (accelerate.utils.DeepSpeedEngineWrapper),
/// for programs that call it in the Accelerator's place.
///
///     DeepSpeedEngineWrapper engine(m);  // or accelerator.deepspeed_engine_wrapped()
///     engine.backward(loss, /*sync_gradients=*/last_of_the_group);
///     optimizer.step();
///     optimizer.zero_grad();
///     std::optional<double> norm = engine.get_global_grad_norm();

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate {

class Accelerator;

/// Cheap to copy; not for longer than the Accelerator that prepared the model.
class ACCELERATE_API DeepSpeedEngineWrapper {
 public:
  /// @throws ConfigError for a model that no DeepSpeed configuration trains
  template <class Model>
  explicit DeepSpeedEngineWrapper(const Prepared<Model>& engine) : DeepSpeedEngineWrapper(engine.core()) {}
  explicit DeepSpeedEngineWrapper(std::shared_ptr<const detail::PreparedModel> model);

  /// Accelerator::backward(), where the caller says whether the accumulation group ends with this micro-step. The step
  /// itself is the optimizer's, as everywhere here: within the group it does nothing, at its end it clips and steps.
  /// Collective as that is.
  /// @throws ConfigError at the second end of a group of which no optimizer of the model has taken the first one's step
  void backward(const at::Tensor& loss, bool sync_gradients = true) const;

  /// The 2-norm of all gradients of the model, averaged and unscaled, before clipping: of the group that has ended, or
  /// else of the latest step. Infinity where they overflowed; unset before the first group has ended.
  /// Collective, of ranks that ask alike.
  std::optional<double> get_global_grad_norm() const;

 private:
  Accelerator* accelerator_;
  std::shared_ptr<const detail::PreparedModel> model_;
};

}  // namespace accelerate
