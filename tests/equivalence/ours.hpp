#pragma once

#include <memory>
#include <string>

#include "machine.hpp"

namespace equivalence {

/// The library, as one rank of a job. @param folder  where it may save, a prefix of names; the same on all ranks
std::unique_ptr<Machine> make_ours(const Case& what, const std::string& folder, Observe observe);
/// Leaves the job, so that the next case finds a process as fresh as possible.
void leave_job();

}  // namespace equivalence
