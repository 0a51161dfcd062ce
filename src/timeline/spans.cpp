#include "timeline/spans.hpp"

#include <algorithm>

namespace accelerate::timeline {

Spans united(Spans spans) {
  std::erase_if(spans, [](const TimeSpan& span) { return span.end <= span.begin; });
  std::sort(spans.begin(), spans.end(), [](const TimeSpan& a, const TimeSpan& b) { return a.begin < b.begin; });
  Spans result;
  for (const auto& span : spans) {
    if (!result.empty() && span.begin <= result.back().end) result.back().end = std::max(result.back().end, span.end);
    else result.push_back(span);
  }
  return result;
}

Spans without(const Spans& from, const Spans& taken) {
  Spans result;
  auto next = taken.begin();
  for (TimeSpan rest : from) {
    while (next != taken.end() && next->end <= rest.begin) ++next;
    for (auto cut = next; cut != taken.end() && cut->begin < rest.end; ++cut) {
      if (cut->begin > rest.begin) result.push_back({rest.begin, cut->begin});
      rest.begin = cut->end;
    }
    if (rest.begin < rest.end) result.push_back(rest);
  }
  return result;
}

int64_t length(const Spans& spans) {
  int64_t sum = 0;
  for (const auto& span : spans) sum += span.end - span.begin;
  return sum;
}

int64_t length_within(const Spans& spans, TimeSpan window) {
  auto span =
      std::partition_point(spans.begin(), spans.end(), [&](const TimeSpan& s) { return s.end <= window.begin; });
  int64_t sum = 0;
  for (; span != spans.end() && span->begin < window.end; ++span)
    sum += std::min(span->end, window.end) - std::max(span->begin, window.begin);
  return sum;
}

}  // namespace accelerate::timeline
