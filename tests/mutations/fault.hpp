#pragma once

/// Part of the copy of the sources in which faults are compiled in; see scripts/mutate.py.

#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <string>

namespace mutations {

/// Adds the names of faults whose place the program comes by to the file that ACCELERATE_FAULTS_REACHED names, each
/// once a process.
inline void note(const std::string& name) {
  static const char* const file = std::getenv("ACCELERATE_FAULTS_REACHED");
  if (!file) return;
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  if (names.insert(name).second) std::ofstream(file, std::ios::app) << name + "\n";
}

/// Whether this is the fault that ACCELERATE_FAULT names.
inline bool fault(const std::string& name) {
  static const std::string active = [] {
    const char* text = std::getenv("ACCELERATE_FAULT");
    return std::string(text ? text : "");
  }();
  note(name);
  return active == name;
}

}  // namespace mutations
