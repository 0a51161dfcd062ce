#pragma once

#include <memory>

#include "accelerate/optim/dummies.hpp"
#include "parallel/zero/zero_settings.hpp"

namespace accelerate::optim {
class GradScaler;
}  // namespace accelerate::optim

/// What a configuration has instead of the program: its optimizer, its schedule, its loss scale.
namespace accelerate::zero {

/// @throws ConfigError where the configuration has none
std::shared_ptr<torch::optim::Optimizer> make_optimizer(const ZeroSettings& settings, const DummyOptim& dummy);

/// The program's callable's, where there is one. @throws ConfigError where neither is there
optim::Scheduler make_scheduler(const ZeroSettings& settings, const DummyScheduler& dummy,
                                torch::optim::Optimizer& optimizer);

/// Null where gradients are neither scaled nor looked at.
std::shared_ptr<optim::GradScaler> make_scaler(const ZeroSettings& settings);

}  // namespace accelerate::zero
