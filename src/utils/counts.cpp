#include "utils/counts.hpp"

namespace accelerate::counts {
namespace {

std::vector<Values>& entered_values() {
  static std::vector<Values> all;
  return all;
}

}  // namespace

const std::vector<Values>& all() { return entered_values(); }

bool detail::enter(Values values) {
  entered_values().push_back(values);
  return true;
}

void reset() {
  for (const auto values : all())
    for (auto& count : values) count.store(0, std::memory_order_relaxed);
}

}  // namespace accelerate::counts
