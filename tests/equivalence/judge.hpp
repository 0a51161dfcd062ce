#pragma once

#include <optional>
#include <string>
#include <vector>

#include "job.hpp"

namespace equivalence {

/// A line of the table of refusals in docs/equivalence.md.
struct Refusal {
  std::vector<std::string> where;  ///< each of these stands in the case's file
  std::string error;               ///< its class
  std::string text;                ///< a part of what it says
};
std::vector<Refusal> read_refusals(const std::string& page);

struct Verdict {
  /// "" where all is right, "refused" as the table says, "right in fp64" where fp32 is too coarse to tell; else what is
  /// wrong in a word or two, the same for failures that are likely to have one cause.
  std::string kind;
  std::string text;
  bool failed() const { return !kind.empty() && kind != "refused" && kind != "right in fp64"; }
};

/// Compares a run with the reference, which it computes.
Verdict judge(const Case& what, const Report& report, const std::vector<Refusal>& refusals);

/// The case in fp64, where its numbers in fp32 may be roundings that have grown: Adam and Adagrad make a whole step of
/// a gradient that is zero in exact arithmetic. Nothing for optimizers without that, and in 16 bits. (Each such case
/// runs with SGD in fp32, too.)
std::optional<Case> in_double(Case what);

}  // namespace equivalence
