#pragma once

/// One rank's share of a stream of samples.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// How a pass reads a stream: `group` samples per step, of which [begin, end) are this rank's.
struct StreamPlan {
  int64_t group = 1, begin = 0, end = 1;
  int64_t chunk = 1;                 ///< samples per request to a LibTorch stream
  bool complete = false;             ///< complete a short last group with samples of the first one
  bool drop_last = false;            ///< leave a short last group out
  int64_t skip_samples = 0;          ///< left out before the first group, which another run has read
  int64_t rank = 0, world_size = 1;  ///< the place that a stream which shards itself is told; 1: none
};

/// Takes a rank's share of group after group. Keeps the first group when a short last one is to be completed.
template <class Sample> class GroupReader {
 public:
  void reset() {
    first_.clear();
    first_known_ = ended_ = false;
  }

  /// This rank's share; empty at the end. `got` is how many samples the group had.
  template <class Next> std::vector<Sample> read(Next&& next, const StreamPlan& plan, int64_t& got) {
    std::vector<Sample> mine;
    got = 0;
    if (ended_) return mine;
    mine.reserve(static_cast<size_t>(plan.end - plan.begin));
    const bool remember = plan.complete && !first_known_;
    while (got < plan.group) {
      std::optional<Sample> sample = next();
      if (!sample) {
        ended_ = true;
        break;
      }
      if (remember) first_.push_back(*sample);
      if (got >= plan.begin && got < plan.end) mine.push_back(std::move(*sample));
      ++got;
    }
    first_known_ = first_known_ || got > 0;
    if (got == plan.group) return mine;
    if (plan.drop_last || got == 0) mine.clear();
    else if (plan.complete)
      for (int64_t i = std::max(got, plan.begin); i < plan.end; ++i)
        mine.push_back(first_[static_cast<size_t>(i - got) % first_.size()]);
    return mine;
  }

 private:
  std::vector<Sample> first_;
  bool first_known_ = false, ended_ = false;
};

}  // namespace accelerate::data::detail
