#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "residency/unit.hpp"
#include "utils/raise.hpp"

namespace accelerate::parallel {

/// The units that this rank computes with, each once until it is resharded. Ranks that use other units, or in another
/// order, part ways; a comparison of gathers would not always show it, because some ranks fetch ahead what others need,
/// or share memory.
class UsedUnits {
 public:
  void add(const residency::Unit& unit) {
    const auto index = static_cast<size_t>(unit.index());
    if (index >= present_.size()) present_.resize(index + 1);
    if (std::exchange(present_[index], &unit)) return;
    digest_ = digest_ * 1099511628211U + static_cast<uint64_t>(unit.index()) + 1;
    constexpr size_t kMostNames = 100;
    if (order_.size() < kMostNames) order_.push_back(&unit);
  }
  /// @param kept  also those that stay through a pass
  void reshard(bool kept) {
    for (auto& unit : present_)
      if (unit && (kept || !unit->keep())) unit = nullptr;
  }
  /// A digest of the units that came since forget(), and of their order.
  uint64_t digest() const { return digest_; }
  /// The first of them for people.
  std::string names() const {
    std::string names;
    for (const auto* unit : order_)
      names += (names.empty() ? "'" : ", '") + (unit->name().empty() ? "(root)" : unit->name()) + "'";
    return names.empty() ? "none" : names;
  }
  void forget() { order_.clear(), digest_ = 0; }
  /// Forgets. @param alike  whether all ranks had the same digest @throws CommError where they had not
  void check(const char* operation, bool alike) {
    const std::string units = alike ? "" : names();
    forget();
    if (!alike)
      raise<CommError>(
          "{}: since ranks met last they have used different parts of a sharded model, or in another order; this one: "
          "{}. Expected the same on all ranks, in the same order: all gather each part together, and only by chance, "
          "or where they share memory, is it there anyway. Look for control flow that depends on the rank or on its "
          "data, and add what is left out with a factor of 0 to the loss",
          operation, units);
  }

 private:
  std::vector<const residency::Unit*> present_;  ///< by index; null: it is to be gathered
  std::vector<const residency::Unit*> order_;
  uint64_t digest_ = 0;
};

}  // namespace accelerate::parallel
