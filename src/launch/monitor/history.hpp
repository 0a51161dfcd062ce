#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "launch/monitor/snapshot.hpp"

namespace accelerate::launcher {

/// The figures of ranks over time, for the page's plots: least, mean and most over the ranks, in so few points that a
/// long run takes no more memory than a short one. When there are twice as many points as wanted, each two become one.
class History {
 public:
  explicit History(size_t points = 120) : points_(points) {}
  void add(const Snapshot& snapshot);
  /// {"seconds": [...], "figures": [{"name", "title", "unit", "least": [...], "mean": [...], "most": [...]}]}: null
  /// where nobody knew, and only figures that somebody has ever known; first those that the program logs, "logged/" and
  /// its name for each. Unit: "/s", "FLOP/s", "%", "bytes", or "value" of what is logged.
  nlohmann::ordered_json json() const;

  static constexpr size_t kFigures = 9;
  static constexpr size_t kMostLogged = 16;  ///< names; later ones are left out

 private:
  struct Range {
    double least, mean, most;
  };
  /// One or more looks.
  struct Point {
    double seconds = 0;
    size_t looks = 0;
    /// kFigures, and those that had been logged by then.
    std::vector<std::optional<Range>> figures;
    std::optional<Range> at(size_t figure) const { return figure < figures.size() ? figures[figure] : std::nullopt; }
  };
  static Point merged(const Point& a, const Point& b);
  /// The figure of a name that has been logged; nothing when there is no place for it.
  std::optional<size_t> figure_of(const std::string& name);

  size_t points_, looks_per_point_ = 1;
  std::vector<Point> all_;
  std::vector<std::string> logged_;  ///< names
};

}  // namespace accelerate::launcher
