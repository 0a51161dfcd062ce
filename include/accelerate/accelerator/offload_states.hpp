#pragma once

#include "accelerate/parallel/offload_states.hpp"
#include "accelerate/utils/export.hpp"

namespace accelerate::detail {

struct PreparedModel;

ACCELERATE_API void offload_states(const PreparedModel& model, const OffloadStatesOptions& options);
ACCELERATE_API void reload_states(const PreparedModel& model, bool non_blocking);

}  // namespace accelerate::detail
