#pragma once

/// Optimizers, schedules and loss scaling: all that happens at `step()`.

#include "accelerate/optim/accelerated_scheduler.hpp"
#include "accelerate/optim/adam8bit.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"
#include "accelerate/optim/deepspeed_schedules.hpp"
#include "accelerate/optim/element_wise.hpp"
#include "accelerate/optim/grad_scaler.hpp"
#include "accelerate/optim/lamb.hpp"
#include "accelerate/optim/lion.hpp"
#include "accelerate/optim/muon.hpp"
#include "accelerate/optim/optimizer.hpp"
#include "accelerate/optim/scheduler.hpp"
#include "accelerate/optim/schedules.hpp"
#include "accelerate/optim/step_hooks.hpp"
#include "accelerate/optim/steps_on_pieces.hpp"
