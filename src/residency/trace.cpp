#include "residency/trace.hpp"

#include <cstddef>

namespace accelerate::residency {
namespace {

constexpr std::size_t kLongest = 1 << 16;  ///< transitions remembered; an iteration has a few hundred

uint64_t pair(int32_t previous, int32_t unit) {
  return static_cast<uint64_t>(static_cast<uint32_t>(previous)) << 32 | static_cast<uint32_t>(unit);
}

}  // namespace

void Trace::record(int32_t unit) {
  if (history_.size() == kLongest) {
    const auto half = static_cast<std::ptrdiff_t>(kLongest / 2);
    history_.erase(history_.begin(), history_.begin() + half);
    match_ = match_ >= half ? match_ - half : -1;
    last_seen_.clear();
    for (std::size_t i = 1; i < history_.size(); ++i)
      last_seen_[pair(history_[i - 1], history_[i])] = static_cast<int64_t>(i);
  }
  const bool expected = next(1) == unit;
  const int32_t previous = history_.empty() ? -1 : history_.back();
  history_.push_back(unit);
  const auto position = static_cast<int64_t>(history_.size()) - 1;
  const auto known = last_seen_.find(pair(previous, unit));
  if (expected) {
    ++match_;
  } else {
    ++surprises_;
    match_ = known == last_seen_.end() ? -1 : known->second;
  }
  last_seen_[pair(previous, unit)] = position;
}

int32_t Trace::next(int64_t ahead) const {
  const auto position = match_ + ahead;
  return match_ >= 0 && position < static_cast<int64_t>(history_.size()) ? history_[static_cast<std::size_t>(position)]
                                                                         : -1;
}

int64_t Trace::distance(int32_t unit) const {
  if (match_ < 0) return kNever;
  for (auto i = static_cast<std::size_t>(match_) + 1; i < history_.size(); ++i)
    if (history_[i] == unit) return static_cast<int64_t>(i) - match_;
  return kNever;
}

}  // namespace accelerate::residency
