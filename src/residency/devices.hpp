#pragma once

#include "residency/chain.hpp"

namespace accelerate::residency {

/// For models that lie on several devices of one process: an operator runs where its parameters are, and its other
/// operands are brought there. No module has to know. On the chain while such a model exists.
///
/// - An operator on members runs on their device; one that writes into an operand, on that operand's device (who holds
///   the operand expects it to change).
/// - An operator without members (a residual connection, a mask that is added) whose operands lie on several devices
///   runs where this thread last computed with members, if an operand is there, else at its first operand.
/// - What is meant to cross devices (to(), copy_()) is left alone, and so are numbers in host memory (0-dimensional),
///   which every device takes. The copies are ordinary operators: autograd brings gradients back.
///
/// Operators without members come by only on threads that have computed with members of such a model; from then on,
/// until no such model is left, all of theirs do (a microsecond each).
Handler& devices_handler();

}  // namespace accelerate::residency
