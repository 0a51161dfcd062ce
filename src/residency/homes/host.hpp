#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "residency/home.hpp"
#include "residency/worker.hpp"

namespace accelerate::residency {

/// A copy in host memory (pinned where a GPU exists), possibly of another dtype than the unit's: cast on the way. On a
/// GPU the copy runs on a stream of its own.
std::unique_ptr<Home> host_home(at::Tensor master, std::shared_ptr<Worker> worker);

/// Memory that is the flat storage itself: nothing moves.
/// @param place  Place::file for a file that is mapped
std::unique_ptr<Home> memory_home(at::Tensor flat, BytesPlace place = BytesPlace::memory);

/// Memory that is the flat storage itself, in the compute dtype of `master`, which has all of its elements in another
/// one: what operators write reaches that at once. Code that changes the master sees to the image.
std::unique_ptr<Home> image_home(at::Tensor flat, const at::Tensor& master);

}  // namespace accelerate::residency
