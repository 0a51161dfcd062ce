#pragma once

#include <set>
#include <string>

namespace accelerate {

/// A warning that a run gives once for each thing that it concerns; of more than a hundred it is silent.
class SaidOnce {
 public:
  bool is_first(const std::string& thing) { return said_.size() < 100 && said_.insert(thing).second; }

 private:
  std::set<std::string> said_;
};

}  // namespace accelerate
