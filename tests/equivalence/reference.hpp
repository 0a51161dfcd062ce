#pragma once

#include <memory>

#include "machine.hpp"

namespace equivalence {

/// Plain LibTorch in one process: each rank's replica runs its own batches one after the other, and gradients and
/// buffers are combined as the layout's documentation says. Nothing of the library is in it but its 8-bit
/// optimizer, where the case names that.
/// @param blur  how far inputs, outputs, and gradients before they are averaged are moved, as a part of their size, at
/// random from the seed:
///              how much results differ then is how much rounding alone can make of them
std::unique_ptr<Machine> make_reference(const Case& what, Observe observe, double blur = 0, uint64_t seed = 0);

}  // namespace equivalence
