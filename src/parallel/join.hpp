#pragma once

#include <functional>

#include "accelerate/parallel/engine.hpp"

namespace accelerate::parallel {

/// Runs `loop`, in which ranks may take different numbers of training steps. A rank that is done does its share of the
/// others' steps until all are; then all get the models of a rank that stopped last. Gradients are divided by the
/// number of all ranks throughout. Collective. `models`: all that the loop trains, in the same order on every rank.
/// @throws ConfigError when one of them has an engine that can't join.
void join(const Engines& models, const std::function<void()>& loop);

/// The largest rank that is a candidate. Collective.
int64_t last_candidate(bool candidate);

}  // namespace accelerate::parallel
