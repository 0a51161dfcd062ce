#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "residency/unit.hpp"

namespace accelerate::residency {

/// While it lives, the units of some members are present for code that goes around operators. Raw pointers leave no
/// trace of what is written through them; so it is said beforehand what becomes of it, or found out at the end.
class RawAccess {
 public:
  enum class Writes {
    lost,    ///< The unit is absent afterwards and has the values that it had.
    stored,  ///< Everything counts as written. The unit is absent afterwards.
    alone,   ///< The same; and operators meanwhile work on the bytes as on plain tensors, so that one rank may do what
             ///< others don't.
    found  ///< The bytes of the tensors that were added are compared with those at the start; on other devices than the
           ///< CPU reading them would cost more than storing, so there everything counts as written. The unit stays.
  };

  explicit RawAccess(Writes writes) : writes_(writes) {}
  RawAccess(const RawAccess&) = delete;
  RawAccess& operator=(const RawAccess&) = delete;
  /// Never communicates.
  ~RawAccess();

  /// Fetches the member's unit if it isn't here. @throws what its home throws; those added before stay.
  void add(const Member& member);

 private:
  Writes writes_;
  std::vector<Unit*> units_;                               ///< pinned, each once
  std::vector<std::pair<const Member*, size_t>> watched_;  ///< with a hash of its bytes at the start
};

}  // namespace accelerate::residency
