#pragma once

/// Runs JSON cases that the reference implementation produced. One small file per kind of case registers itself here.

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace conformance {

using json = nlohmann::json;

/// Rows of one file where the reference is wrong and we are right: each by its name, with the reason. They stand in
/// differing/<file>.json as {reason: [names]}, which `conformance_tests --cases DIR --write-differing DIR` writes
/// again.
using Differing = std::map<std::string, std::string>;

/// Counts the rows of one file and keeps the details of the first failures.
class Report {
 public:
  /// @param complete  Whether `listed` knows all rows of the file. Cases of other folders may have rows that nobody
  /// could list: there a reason that the runner finds by itself is enough.
  explicit Report(Differing listed, bool complete) : listed_(std::move(listed)), complete_(complete) {}

  /// One row: passed, or failed with what was found.
  void check(bool passed, const std::function<std::string()>& detail);
  /// One row of a file of which some differ. It fails, too, if it passes though it is listed as one that differs.
  void check(const json& row, bool passed, const std::function<std::string()>& detail);
  /// Runs the checks of a row: where they throw, the row has failed, and the rows behind it are checked all the same.
  void guarded(const json& row, const std::function<void()>& checks);
  /// One row where the reference is wrong and we gave the right answer. It fails unless it is listed with this reason,
  /// and where the list is complete.
  void differs(const json& row, const std::string& reason);

  int64_t passed() const { return passed_; }
  int64_t failed() const { return failed_; }
  const std::vector<std::string>& details() const { return details_; }
  /// The rows that differed, whether they were listed or not.
  const Differing& found() const { return found_; }
  /// Listed rows that a file with a complete list does not have.
  std::vector<std::string> not_met() const;

  /// The name of a row: its beginning, and a number that tells it from others.
  static std::string name_of(const json& row);

 private:
  int64_t passed_ = 0, failed_ = 0;
  std::vector<std::string> details_;
  const Differing listed_;
  const bool complete_;
  Differing found_;
  std::set<std::string> met_;
};

/// A kind of cases: its name is the file's name without ".json".
struct Kind {
  /// Checks all rows of a file.
  std::function<void(const json& file, Report& report)> run;
  /// For kinds with several ranks: what one rank finds. Runs in a process of its own, in which WORLD_SIZE and so on are
  /// set.
  std::function<json(const json& file)> rank = nullptr;
};

std::map<std::string, Kind>& kinds();

struct Registration {
  Registration(const std::string& name, Kind kind) { kinds()[name] = std::move(kind); }
};

/// The findings of a kind's ranks, in rank order. @throws std::runtime_error with the ranks' output when one of them
/// fails.
std::vector<json> in_ranks(const std::string& kind, const json& file, int64_t world_size);

/// Another file of the folder that is being run, or, where that folder lacks it, of the cases in this repository.
json companion(const std::string& name);

/// True when f throws an exception of our library; its text goes to `what`.
bool throws_error(const std::function<void()>& f, std::string* what = nullptr);

/// Numbers within rounding of what JSON can hold, everything else exactly.
bool close(const json& found, const json& expected, double tolerance);

}  // namespace conformance
