#include "accelerate/trackers/value.hpp"

namespace accelerate {

std::optional<double> TrackerValue::number() const {
  if (const auto* real = std::get_if<double>(&value)) return *real;
  if (const auto n = whole()) return static_cast<double>(*n);
  return std::nullopt;
}

std::optional<int64_t> TrackerValue::whole() const {
  if (const auto* n = std::get_if<int64_t>(&value)) return *n;
  if (const auto* truth = std::get_if<bool>(&value)) return *truth ? 1 : 0;
  return std::nullopt;
}

bool operator==(const TrackerValue& a, const TrackerValue& b) { return a.value == b.value; }

}  // namespace accelerate
