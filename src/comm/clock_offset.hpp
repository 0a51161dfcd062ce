#pragma once

#include <cstdint>
#include <functional>

namespace accelerate::comm {

class Group;

/// How far this rank's clock is from rank 0's.
struct ClockOffset {
  int64_t offset_ns = 0;  ///< to add to this rank's time to get rank 0's
  int64_t error_ns = 0;   ///< at most: half of the quickest way there and back; 0: it is the same clock
};

/// Asks rank 0 what time it is, several times; the quickest answer counts. Collective; blocks, the longer the more
/// ranks there are, which rank 0 answers one after the other. @throws CommError
/// @param now  nanoseconds since 1970; for tests
ClockOffset clock_offset(Group& group, const std::function<int64_t()>& now = {});

}  // namespace accelerate::comm
