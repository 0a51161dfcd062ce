#pragma once

#include <memory>

#include "accelerate/utils/kwargs.hpp"

namespace c10d {
class CommHookInterface;
}

namespace accelerate::parallel {

/// How a bucket of gradients is averaged: all-reduce through our Group (so a peer's failure ends the wait), divided by
/// the number of ranks, sent as fp16 or bf16 when asked for.
std::unique_ptr<c10d::CommHookInterface> make_gradient_hook(DDPCommunicationHookType type);

}  // namespace accelerate::parallel
