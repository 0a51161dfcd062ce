#pragma once

#include <c10/util/SmallVector.h>

#include "residency/chain.hpp"

namespace accelerate::residency {

/// Members that an operator writes to and whose homes keep values of their own.
using Written = c10::SmallVector<Member*, 4>;

/// Carries out the operator, whose units are pinned, so that what it writes reaches those homes at once, as if it had
/// worked on whole parameters in the precision that they keep.
void carry_out_writes(OperatorCall& call, const Next& next, const Written& written);

}  // namespace accelerate::residency
