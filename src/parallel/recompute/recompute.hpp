#pragma once

#include <memory>
#include <string>
#include <vector>

#include "accelerate/utils/export.hpp"
#include "parallel/layer.hpp"
#include "residency/activations/unit_checkpoints.hpp"

namespace accelerate::parallel {

/// Activations of the units that the layer before it has made of a model, but the root's, are computed again in
/// backward instead of being kept. See residency::UnitCheckpoints.
class ACCELERATE_API Recompute final : public Layer {
 public:
  /// @param given  parameters, of which some are members of units
  Recompute(const std::vector<Held>& given, const residency::UnitCheckpointOptions& options);

  std::string name() const override { return "recompute"; }
  void before_forward() override;
  void after_forward(const std::vector<at::Tensor>&) override { leave_forward(); }
  void leave_forward() noexcept override;
  void begin_join() override {}

 private:
  std::unique_ptr<residency::UnitCheckpoints> checkpoints_;  ///< null: no parameter is a unit's
};

}  // namespace accelerate::parallel
