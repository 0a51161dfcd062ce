#pragma once

/// Everything. Declares nothing itself, and brings LibTorch's own umbrella along, since a training program needs it anyway; sources that care for their compile
/// time include the headers below one by one, which pull in as little of LibTorch as they can.

#include <torch/torch.h>

#include "accelerate/activations.hpp"
#include "accelerate/accelerator.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/data.hpp"
#include "accelerate/deferred.hpp"
#include "accelerate/dry_run.hpp"
#include "accelerate/error.hpp"
#include "accelerate/kwargs.hpp"
#include "accelerate/kwargs_dict.hpp"
#include "accelerate/memory.hpp"
#include "accelerate/model_ref.hpp"
#include "accelerate/nested.hpp"
#include "accelerate/ops.hpp"
#include "accelerate/optim.hpp"
#include "accelerate/parallel/ddp.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/precision.hpp"
#include "accelerate/prepared.hpp"
#include "accelerate/progress.hpp"
#include "accelerate/random.hpp"
#include "accelerate/record.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/safetensors.hpp"
#include "accelerate/split.hpp"
#include "accelerate/state.hpp"
#include "accelerate/tracker.hpp"
#include "accelerate/version.hpp"
