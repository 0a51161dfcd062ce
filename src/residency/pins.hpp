#pragma once

#include <c10/util/SmallVector.h>

namespace accelerate::residency {

class Unit;

/// Keeps the units of some tensors pinned for the length of a scope. Movable storage for the few units of one operator.
class Pins {
 public:
  Pins() = default;
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  /// Most operators have no pins, and this is on the way of every one.
  ~Pins() {
    if (!units_.empty()) release();
  }
  void add(Unit& unit, bool writes);

 private:
  void release();

  c10::SmallVector<Unit*, 4> units_;
};

}  // namespace accelerate::residency
