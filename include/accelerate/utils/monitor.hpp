#pragma once

#include <cstdint>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// Tells `accelerate launch --monitor` that this process has done `steps` steps so far; the view shows the count and
/// the rate.
///
/// Optimizers that were prepared report their steps by themselves; a program that steps in another way (inference, an
/// optimizer of its own) calls this, and from then on only this counts. A few stores into shared memory; nothing when
/// nobody monitors. Any thread.
ACCELERATE_API void report_step(int64_t steps);

/// This process has worked through so many tokens more (or images: what the program counts). The view shows their rate
/// from the next step on.
///
/// `Accelerator::backward(loss, num_items)` counts its items by itself; from the first call of this on only this
/// counts. One relaxed add. Any thread.
ACCELERATE_API void report_tokens(int64_t tokens);

/// The models of this process have needed so many floating-point operations more, a multiplication and an addition
/// being two. The view shows operations per second, and what share that is of what the device could do.
///
/// Without it they are estimated from tokens and the parameters of prepared models: 2 for each parameter and token in
/// the forward, 2 for each in the backward, and 2 for each that is trained; tables of embeddings, which are read and
/// not multiplied with, don't count. That is 6 x parameters x tokens, which leaves out attention's scores, and is wrong
/// where a parameter is used many times for a token (convolutions): say it yourself then. From the first call on only
/// this counts. Any thread.
ACCELERATE_API void report_flops(double flops);

}  // namespace accelerate
