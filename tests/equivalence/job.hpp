#pragma once

#include <string>
#include <vector>

#include "machine.hpp"

namespace equivalence {

/// How one case went in one rank.
struct RankReport {
  std::vector<Observation> seen;
  bool finished = false;
  std::string error;       ///< the class of the exception that ended it, "foreign" for those of others; or empty
  std::string error_text;  ///< its what()
  std::string end;         ///< how the process ended, if not as it should have: "signal 11", "killed: …"
  std::string output;      ///< of the process
};

/// One case in all its ranks.
using Report = std::vector<RankReport>;

/// Runs cases that have one number of ranks, one after the other in the same processes. A case that failed ends its
/// processes; those behind it come in new ones.
std::vector<Report> run_cases(const std::vector<Case>& cases);

/// The work of such a job's processes: argument is the folder that run_cases gave them. @return the exit status
int run_rank(const std::string& folder);

}  // namespace equivalence
