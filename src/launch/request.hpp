#pragma once

#include "accelerate/launch.hpp"
#include "launch/job/settings.hpp"

namespace accelerate::launcher {

/// The options as the launcher reads them: fields that somebody set become entries of `settings`, before those that are
/// there.
LaunchRequest request_of(const LaunchOptions& options);

}  // namespace accelerate::launcher
