#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "residency/unit.hpp"

namespace accelerate::parallel {

/// What this rank would have gathered if the ranks had no memory in common: each unit once until it is resharded.
class UsedUnits {
 public:
  void add(const residency::Unit& unit) {
    const auto index = static_cast<size_t>(unit.index());
    if (index >= present_.size()) present_.resize(index + 1);
    if (!std::exchange(present_[index], &unit)) order_.push_back(&unit);
  }
  /// @param kept  also those that stay through a pass
  void reshard(bool kept) {
    for (auto& unit : present_)
      if (unit && (kept || !unit->keep())) unit = nullptr;
  }
  /// Of which units came since forget(), and in which order.
  uint64_t digest() const {
    uint64_t digest = 0;
    for (const auto* unit : order_) digest = digest * 1099511628211U + static_cast<uint64_t>(unit->index()) + 1;
    return digest;
  }
  /// The same for people.
  std::string names() const {
    std::string names;
    for (const auto* unit : order_)
      names += (names.empty() ? "'" : ", '") + (unit->name().empty() ? "(root)" : unit->name()) + "'";
    return names.empty() ? "none" : names;
  }
  void forget() { order_.clear(); }

 private:
  std::vector<const residency::Unit*> present_;  ///< by index; null: it is to be gathered
  std::vector<const residency::Unit*> order_;
};

}  // namespace accelerate::parallel
