#pragma once

#include "residency/chain.hpp"

namespace accelerate::residency {

/// Makes the units of all members among the arguments present and pins them until the operator has ended. On the chain
/// from install_fallback() on.
Handler& touch_handler();

}  // namespace accelerate::residency
