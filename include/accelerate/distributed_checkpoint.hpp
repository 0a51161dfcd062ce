#pragma once

/// Distributed checkpoints of your own dict: state dicts of models and optimizers, and saving and loading them.
/// Declares nothing itself.

#include "accelerate/accelerator/distributed_checkpoint.hpp"
#include "accelerate/run_state/state_dict.hpp"
