#pragma once

/// Ranks that fail, fail together, and all of them with the reason. Which form is for what:
///
/// | what may fail                                                        | use                                       |
/// |----------------------------------------------------------------------|-------------------------------------------|
/// | work of each rank by itself, between collectives (reading, checking) | on_all_ranks_or_throw()                   |
/// | c10d's own code that communicates (a backward with buckets)          | Group::guard(), Group::guard_collective() |
/// | this rank alone, while its peers wait for something else             | throw_alone()                             |
/// | a comparison of what all have gathered                               | a plain throw: all see the same           |

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "comm/group.hpp"
#include "utils/raise.hpp"

namespace accelerate::comm {

struct FailedRank {
  int64_t rank = 0;  ///< of the group
  std::string reason;
};

/// Runs `f`, and rethrows what it throws here once all ranks know of it; CommErrors at once, since ranks are no longer
/// in step then. Collective: ranks on which it succeeds wait for the verdict. `f` may be collective only if no rank can
/// fail alone in its middle.
/// @param group  nullptr: this process is alone
/// @return where it succeeded here: the first rank on which it did not
std::optional<FailedRank> failed_elsewhere(Group* group, const std::function<void()>& f);

/// The same of all ranks of the job: if `f` throws on one, all throw, the others an E.
template <class E> void on_all_ranks_or_throw(const std::function<void()>& f) {
  if (const auto failed = failed_elsewhere(world_group().get(), f))
    raise<E>("on rank {}: {}", failed->rank, failed->reason);
}

/// Tells the peers, which wait for something else, that this rank fails. Not collective.
template <class E> [[noreturn]] void throw_alone(Group& group, const std::string& text) {
  group.announce_failure(text);
  throw E(text);
}

}  // namespace accelerate::comm
