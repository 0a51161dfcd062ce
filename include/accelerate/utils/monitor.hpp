#pragma once

#include <cstdint>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Tells `accelerate launch --monitor` that this process has done `steps` steps so far; the view shows the count and
/// the rate.
///
/// Optimizers that were prepared report their steps by themselves; a program that steps in another way (inference, an
/// optimizer of its own) calls this, and from then on only this counts. Two stores into shared memory; nothing when
/// nobody monitors. Any thread.
ACCELERATE_API void report_step(int64_t steps);

}  // namespace accelerate
