#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "residency/disk/disk_memory.hpp"
#include "residency/home.hpp"

namespace accelerate::residency {

/// One process's slice of a flat storage, wherever that lies.
struct KeptSlice {
  /// Its flat storage is the slice. One that is mapped (memory) may be changed by others, step() for example;
  /// all others are changed here only, or are made of `masters`.
  std::shared_ptr<Home> home;
  int64_t numel = 0;
  at::ScalarType dtype = at::kFloat;
  at::Tensor message = {};  ///< defined: the wire's message of the slice, however it changes
  /// [numel]: what writes reach, where that is more than what the home holds. The home's values are made of them.
  at::Tensor masters = {};
  std::shared_ptr<int64_t> made_of = {};  ///< which version of the masters; null: they are the home's own bytes

  at::Tensor bytes = {};  ///< the home's, where they lie
  struct Ahead {
    at::Tensor values;                ///< in memory
    std::unique_ptr<Transfer> going;  ///< to the disk
  };
  std::shared_ptr<Ahead> ahead = {};  ///< what take_ahead() takes; null: they are the home's own bytes

  /// The home's values are those of the masters. @param anyway  also where no version tells that these have changed
  void make_current(bool anyway = false) const;
  /// The masters have other values for a while: those that the home would have of them are made beside its own.
  void make_ahead() const;
  /// They take the home's values' place, whose masters are what they were then. @return whether there are any
  bool take_ahead() const;
};
/// In memory: on the device, or on the host.
KeptSlice in_memory(at::Tensor slice);
/// @param slice  has its place on the disk
KeptSlice on_disk(const std::shared_ptr<DiskMemory>& disk, at::Tensor slice);
/// The same as the image of masters, in another dtype.
KeptSlice image_of(at::Tensor masters, KeptSlice image);

/// All of a flat storage is kept by this process alone, and comes and goes.
std::unique_ptr<Home> kept_home(KeptSlice whole);

}  // namespace accelerate::residency
