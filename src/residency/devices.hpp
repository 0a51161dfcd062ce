#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

/// Models that lie on several devices of one process: an operator runs where its parameters are, and its other operands
/// are brought there. No module has to know.
///
/// - An operator on members runs on their device; one that writes into an operand, on that operand's device (who holds
/// the operand expects it to change).
/// - An operator without members (a residual connection, a mask that is added) whose operands lie on several devices
/// runs where this thread last computed with members, if an operand is
///   there, else at its first operand.
/// - What is meant to cross devices (to(), copy_()) is left alone, and so are numbers in host memory (0-dimensional),
/// which every device takes. The copies are ordinary operators: autograd brings gradients back.
///
/// Operators without members come by only on threads that have computed with members of such a model; from then on,
/// until no such model is left, all of theirs do (a microsecond each).
namespace accelerate::residency::devices {

/// A model across devices lives from begin() to end().
void begin();
void end();
/// Whether there is one.
bool active();

/// Moves arguments where that is needed. @param unit_device  of the members among the arguments, if there are any.
/// @return true: the arguments have other devices now, dispatch anew.
bool bring_together(const c10::OperatorHandle& op, torch::jit::Stack* stack, std::optional<at::Device> unit_device);

}  // namespace accelerate::residency::devices
