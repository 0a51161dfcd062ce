#pragma once

#include <memory>

#include "machine.hpp"

namespace equivalence {

/// Plain LibTorch in one process: each rank's replica runs its own batches one after the other, and gradients and
/// buffers are combined as the layout's documentation says. Nothing of the library is in it.
std::unique_ptr<Machine> make_reference(const Case& what, Observe observe);

}  // namespace equivalence
