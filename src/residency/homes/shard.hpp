#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/home.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::residency {

/// How a flat storage travels as E4M3 codes.
struct Float8Wire {
  struct Stretch {
    int64_t begin, length;
  };
  std::vector<Stretch> stretches;  ///< of the flat storage; what lies between them is of no interest
  at::Tensor scales;               ///< [stretches], fp32, on the device: codes are of values times these; may change
};

/// Each rank of the group keeps an equal stretch of the flat storage; fetching gathers them. Collective. `shard` may
/// have another dtype than the unit's: it is cast before it is sent, so that fewer bytes travel. It may lie on the host
/// (then it is copied to the device first).
/// @param near  some ranks of the group, the same number of consecutive ones everywhere, or null. keep_for_backward()
/// leaves an equal stretch with each of them, in the compute dtype, and
///              the next fetch gathers among them alone.
/// @param wire  set: the shards travel as codes, and are decoded where they arrive.
/// @param name  for the error when ranks fetch different units (debug mode).
std::unique_ptr<Home> shard_home(at::Tensor shard, std::shared_ptr<comm::Group> group,
                                 std::shared_ptr<comm::Group> near, std::string name,
                                 std::optional<Float8Wire> wire = std::nullopt);

}  // namespace accelerate::residency
