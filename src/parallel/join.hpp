#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "accelerate/parallel/engine.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::parallel {

/// Runs `loop`, in which ranks may take different numbers of training steps. A rank that is done does its share of the
/// others' steps until all are; then all get the models of a rank that stopped last. Gradients are divided by the
/// number of all ranks throughout. Collective. `models`: all that the loop trains, in the same order on every rank.
/// @param shadowed  called after each share that this rank has done without data, with whether gradients were averaged
/// @return  a rank of comm::kTokens that stopped last, the same on all; nothing when all stopped together
/// @throws ConfigError when one of them has an engine that can't join, and on all ranks when the data of some ends in
/// the middle of an accumulation group.
std::optional<int64_t> join(const Engines& models, const std::function<void()>& loop,
                            const std::function<void(bool averages)>& shadowed);

/// The largest rank of the group that is a candidate; -1 where nobody is. Collective over it.
int64_t last_candidate(comm::Group& group, bool candidate);

}  // namespace accelerate::parallel
