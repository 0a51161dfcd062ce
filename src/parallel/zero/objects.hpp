#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "accelerate/optim/dummies.hpp"
#include "parallel/zero/zero_settings.hpp"

namespace accelerate {
class DeepSpeedConfig;
namespace optim {
class GradScaler;
}  // namespace optim
namespace parallel {
struct DeepSpeedFiles;
struct FileMonitor;
struct Observed;
}  // namespace parallel
namespace residency {
class CheckpointRulesScope;
}  // namespace residency
}  // namespace accelerate

/// Objects that a configuration has instead of the program: its optimizer, its schedule, its loss scale.
namespace accelerate::zero {

/// The names of parameters of the models that train.
using ParameterNames = std::unordered_map<const at::TensorImpl*, std::string>;
/// @throws ConfigError where the configuration has none
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const ZeroSettings& settings, const DummyOptim& dummy,
                                                        const ParameterNames& names);

/// The schedule of the program's callable, where there is one. @throws ConfigError where neither is there
optim::Scheduler make_scheduler(const ZeroSettings& settings, const DummyScheduler& dummy,
                                torch::optim::Optimizer& optimizer);

std::vector<parallel::FileMonitor> monitors_of(const ZeroSettings& settings);

parallel::Observed observed_of(const ZeroSettings& settings);
/// Whether a key acts only on layers that are recomputed.
bool is_of_recomputation(std::string_view key);
/// The rules for such layers, while it lives; null: as without a configuration.
std::unique_ptr<residency::CheckpointRulesScope> checkpoint_rules_of(const ZeroSettings& settings);

/// The settings that checkpoints are written by. @param config  the filled configuration that the settings were read
/// from
std::shared_ptr<const parallel::DeepSpeedFiles> make_files(const ZeroSettings& settings, const DeepSpeedConfig& config);

/// Null where gradients are neither scaled nor looked at.
std::shared_ptr<optim::GradScaler> make_scaler(const ZeroSettings& settings);

}  // namespace accelerate::zero
