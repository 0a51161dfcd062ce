#pragma once

/// Part of the copy of the sources in which faults are compiled in; see scripts/mutate.py.

#include <cstdlib>
#include <string>

namespace mutations {

/// Whether this is the fault that ACCELERATE_FAULT names.
inline bool fault(const std::string& name) {
  static const std::string active = [] {
    const char* text = std::getenv("ACCELERATE_FAULT");
    return std::string(text ? text : "");
  }();
  return active == name;
}

}  // namespace mutations
