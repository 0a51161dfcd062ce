#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "timeline/activity.hpp"
#include "timeline/trace_file.hpp"

/// A report on what the ranks of a job did in each step, and what follows from it.
namespace accelerate::timeline {

/// A time in parts, in nanoseconds. `compute`, `exposed`, `data`, `weights`, `checkpoint` and `other` sum up to
/// `total`.
struct Shares {
  int64_t total = 0;
  int64_t compute = 0;        ///< an operator (or a kernel, where there are some) computed
  int64_t communication = 0;  ///< exchanges were under way, whatever else happened
  int64_t exposed = 0;        ///< communication during which no operator computed: the rank waited for it
  int64_t data = 0;           ///< it waited for the loader
  int64_t weights = 0;        ///< it waited for weights from host memory or files
  int64_t checkpoint = 0;
  int64_t other = 0;  ///< the program's own code, and what was not recorded

  /// Without the time that other ranks are to blame for.
  int64_t own() const { return total - exposed; }
  Shares& operator+=(const Shares& more);
};

struct StepShares : Shares {
  int64_t number = 0;
  int64_t begin = 0;  ///< nanoseconds since the first event of all ranks
  /// The occupation that took most of each part of the step, as a letter of kPictureLetters. Empty after kMostPictures
  /// steps.
  std::vector<char> picture;
};

/// The parts of a step's picture.
inline constexpr int64_t kPictureParts = 500;
/// Steps of all ranks together that have a picture in the page, of some KB each.
inline constexpr size_t kMostPictures = 400;
/// compute, exposed, data, weights, checkpoint, other.
inline constexpr char kPictureLetters[] = "cedwko";

struct ExchangeShares {
  std::string kind;
  int64_t count = 0, bytes = 0, total = 0, exposed = 0;
};

struct RankReport {
  TraceHead head;
  Shares overall;  ///< of the steps together
  std::vector<StepShares> steps;
  std::vector<ExchangeShares> exchanges;
  std::vector<Operator> operators;  ///< the first kMostOperators
  int64_t most_fetches = 0;         ///< of one unit
  std::string most_fetched;         ///< which
  bool on_device = false, knows_waits = false, knows_steps = false;
  std::set<int64_t> devices;  ///< as Activity's
  int64_t first = 0;          ///< nanoseconds since 1970 on rank 0's clock: its first event
};

inline constexpr size_t kMostOperators = 20;

/// The rank for which others wait.
struct Slowest {
  int64_t rank = 0;
  int64_t behind = 0;         ///< nanoseconds per step more than the median of the others
  int64_t steps = 0, of = 0;  ///< in how many it was the slowest
};

/// Something to do.
struct Advice {
  std::string rule;  ///< its name, which stays
  double value = 0, threshold = 0;
  std::string text;
};

struct Report {
  std::vector<RankReport> ranks;
  Shares overall;                  ///< of all ranks together
  std::optional<Slowest> slowest;  ///< of two ranks or more
  std::vector<Advice> advice;
  std::vector<std::string> notes;  ///< what the traces lack, so what of this is less than it could be
};

/// Reads the traces one after the other. @throws CheckpointError
Report analyse(const std::vector<std::filesystem::path>& traces);

/// Advice that follows from the numbers, by fixed rules. Source of the options that it names: this library.
std::vector<Advice> advise(const Report& report);

/// For programs: times in microseconds. Fields are only added from version to version.
nlohmann::ordered_json to_json(const Report& report);
/// For people.
std::string to_text(const Report& report);
/// A page that needs no network.
std::string to_html(const Report& report, const std::string& title);

/// Joins the traces into one, in which each rank is a process. Reads and writes piece by piece.
/// @throws CheckpointError, ResourceError
void merge(const Report& report, const std::filesystem::path& file);

}  // namespace accelerate::timeline
