#pragma once

#include <cstdint>

namespace accelerate {

/// An optimizer's `steps`-th step is done. Of several optimizers the one that steps most counts. Not a word once the
/// program calls report_step() itself.
void report_optimizer_step(int64_t steps);

}  // namespace accelerate
