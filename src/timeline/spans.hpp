#pragma once

#include <cstdint>
#include <vector>

/// Sets of moments. Needs no LibTorch.
namespace accelerate::timeline {

/// From `begin` to before `end`, in nanoseconds.
struct TimeSpan {
  int64_t begin = 0, end = 0;
};

/// Sorted, and apart from each other.
using Spans = std::vector<TimeSpan>;

/// A sum that stays at the largest number: traces may say anything.
inline int64_t plus(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? (a < 0 ? INT64_MIN : INT64_MAX) : sum;
}

/// The time that any of these spans, in whatever order, covers. Empty ones are left out.
Spans united(Spans spans);
/// The time that `from` covers and `taken` does not.
Spans without(const Spans& from, const Spans& taken);
int64_t length(const Spans& spans);
/// The length of the part within `window`.
int64_t length_within(const Spans& spans, TimeSpan window);

}  // namespace accelerate::timeline
