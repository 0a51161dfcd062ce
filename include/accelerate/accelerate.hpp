#pragma once

/// Everything. Declares nothing itself, and brings LibTorch's own umbrella along, since a training program needs it
/// anyway; sources that care for their compile time include the headers below one by one, which pull in as little of
/// LibTorch as they can.

#include <torch/torch.h>

#include "accelerate/accelerator.hpp"
#include "accelerate/accelerator/dry_run.hpp"
#include "accelerate/accelerator/inference.hpp"
#include "accelerate/accelerator/prepared.hpp"
#include "accelerate/accelerator/record.hpp"
#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/comm.hpp"
#include "accelerate/data.hpp"
#include "accelerate/data/random.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/model_ref.hpp"
#include "accelerate/optim.hpp"
#include "accelerate/parallel/ddp.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/engine.hpp"
#include "accelerate/parallel/fsdp.hpp"
#include "accelerate/parallel/fsdp_plugin.hpp"
#include "accelerate/parallel/megatron_lm_plugin.hpp"
#include "accelerate/parallel/parallelism_config.hpp"
#include "accelerate/precision.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/residency/deferred.hpp"
#include "accelerate/residency/recompute.hpp"
#include "accelerate/state.hpp"
#include "accelerate/trackers/tracker.hpp"
#include "accelerate/utils/error.hpp"
#include "accelerate/utils/kwargs.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "accelerate/utils/memory.hpp"
#include "accelerate/utils/monitor.hpp"
#include "accelerate/utils/nested.hpp"
#include "accelerate/utils/ops.hpp"
#include "accelerate/utils/progress.hpp"
#include "accelerate/utils/split.hpp"
#include "accelerate/utils/version.hpp"
