#pragma once

#include <memory>

#include "accelerate/optim/dummies.hpp"
#include "parallel/zero/zero_settings.hpp"

namespace accelerate {
class DeepSpeedConfig;
namespace optim {
class GradScaler;
}  // namespace optim
namespace parallel {
struct DeepSpeedFiles;
}  // namespace parallel
}  // namespace accelerate

/// What a configuration has instead of the program: its optimizer, its schedule, its loss scale.
namespace accelerate::zero {

/// @throws ConfigError where the configuration has none
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const ZeroSettings& settings, const DummyOptim& dummy);

/// The program's callable's, where there is one. @throws ConfigError where neither is there
optim::Scheduler make_scheduler(const ZeroSettings& settings, const DummyScheduler& dummy,
                                torch::optim::Optimizer& optimizer);

/// What checkpoints are written by. @param config  of which settings were read, filled
std::shared_ptr<const parallel::DeepSpeedFiles> make_files(const ZeroSettings& settings, const DeepSpeedConfig& config);

/// Null where gradients are neither scaled nor looked at.
std::shared_ptr<optim::GradScaler> make_scaler(const ZeroSettings& settings);

}  // namespace accelerate::zero
