#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "residency/home.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::residency {

/// Each rank of the group keeps an equal stretch of the flat storage; fetching gathers them. Collective. `shard` may
/// have another dtype than the unit's: it is cast before it is sent, so that fewer bytes travel. It may lie on the host
/// (then it is copied to the device first).
/// @param near  some ranks of the group, the same number of consecutive ones everywhere, or null. keep_for_backward()
/// leaves an equal stretch with each of them, in the compute dtype, and
///              the next fetch gathers among them alone.
/// @param name  for the error when ranks fetch different units (debug mode).
std::unique_ptr<Home> shard_home(at::Tensor shard, std::shared_ptr<comm::Group> group,
                                 std::shared_ptr<comm::Group> near, std::string name);

}  // namespace accelerate::residency
