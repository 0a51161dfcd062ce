#pragma once

#include <array>
#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "launch/monitor/snapshot.hpp"

namespace accelerate::launcher {

/// What ranks did over time, for the page's plots: least, mean and most over the ranks, in so few points that a long
/// run takes no more memory than a short one. When there are twice as many as wanted, each two become one.
class History {
 public:
  explicit History(size_t points = 120) : points_(points) {}
  void add(const Snapshot& snapshot);
  /// {"seconds": [...], "figures": [{"name", "title", "unit", "least": [...], "mean": [...], "most": [...]}]}: null
  /// where nobody knew, and only figures that somebody has ever known. Unit: "", "/s", "FLOP/s", "%" or "bytes".
  nlohmann::ordered_json json() const;

  static constexpr size_t kFigures = 9;

 private:
  struct Range {
    double least, mean, most;
  };
  /// One or more looks.
  struct Point {
    double seconds = 0;
    size_t looks = 0;
    std::array<std::optional<Range>, kFigures> figures;
  };
  static Point merged(const Point& a, const Point& b);

  size_t points_, looks_per_point_ = 1;
  std::vector<Point> all_;
};

}  // namespace accelerate::launcher
