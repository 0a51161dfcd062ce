#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "residency/home.hpp"
#include "residency/homes/kept_slice.hpp"
#include "residency/homes/wire.hpp"

namespace accelerate::comm {
class Group;
}

namespace accelerate::residency {

/// Each rank of the group keeps an equal slice of the flat storage; fetching gathers them. Collective: at fetch()
/// where a slice is mapped, and where it has to be fetched itself, at the transfer's wait(), which ranks call in one
/// order. Slices may have another dtype than the unit's: they are cast before they are sent, so that fewer bytes
/// travel.
/// @param near  some ranks of the group, the same number of consecutive ones everywhere, or null. keep_for_backward()
/// leaves an equal slice with each of them, in the compute dtype, and
///              the next fetch gathers among them alone.
/// @param name  for the error when ranks fetch different units (debug mode).
/// @param wire  how slices travel; null: as they are, in the compute dtype
std::unique_ptr<Home> shard_home(KeptSlice own, std::shared_ptr<comm::Group> group, std::shared_ptr<comm::Group> near,
                                 std::string name, std::unique_ptr<Wire> wire = nullptr);

}  // namespace accelerate::residency
