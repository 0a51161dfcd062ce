#pragma once

#include <chrono>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct ProgressBarOptions {
  std::optional<int64_t> total;  ///< unset: counts without a bar
  std::string description;       ///< in front of the bar
  std::string unit = "it";
  std::chrono::milliseconds min_interval{100};  ///< between two drawings; ten times that between two lines in a log
  std::chrono::milliseconds delay{0};           ///< before the first one; what is done by then draws nothing at all
  /// Unset: draws on the main process of each machine only, a bar on a terminal and, elsewhere, a line each 10 % of the
  /// way, one each 30 s where that takes longer, and one at the end.
  std::optional<bool> enabled;
};

/// A bar on stderr like tqdm's: done/total, elapsed and remaining time, rate, and whatever `set_postfix` adds. Not
/// thread-safe.
class ACCELERATE_API ProgressBar {
 public:
  explicit ProgressBar(ProgressBarOptions options);
  explicit ProgressBar(int64_t total, const std::string& description = "");
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();

  void update(int64_t steps = 1);
  void set_description(const std::string& text);
  /// Shown behind the rate, e.g. "loss 0.31".
  void set_postfix(const std::string& text);
  /// Draws the last state and ends the line. Called by the destructor.
  void close();
  int64_t count() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {
template <class Range> class TqdmRange {
 public:
  TqdmRange(Range& range, ProgressBarOptions options) : range_(range), bar_(std::move(options)) {}
  using Inner = decltype(std::begin(std::declval<Range&>()));
  struct Iterator {
    Inner inner;
    ProgressBar* bar;
    decltype(auto) operator*() { return *inner; }
    Iterator& operator++() {
      bar->update();
      ++inner;
      return *this;
    }
    bool operator!=(const decltype(std::end(std::declval<Range&>()))& end) { return inner != end; }
  };
  Iterator begin() { return {std::begin(range_), &bar_}; }
  auto end() { return std::end(range_); }

 private:
  Range& range_;
  ProgressBar bar_;
};
}  // namespace detail

/// `for (auto& batch : tqdm(loader))`: a bar that counts the batches of any range that knows its size().
template <class Range> auto tqdm(Range& range, ProgressBarOptions options = {}) {
  if constexpr (requires { range.size(); })
    if (!options.total) options.total = static_cast<int64_t>(range.size());
  return detail::TqdmRange<Range>(range, std::move(options));
}

}  // namespace accelerate
