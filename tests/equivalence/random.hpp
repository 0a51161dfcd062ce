#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace equivalence {

/// The same numbers from a seed on every machine (splitmix64), which std::uniform_int_distribution does not promise.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  /// 0 … count - 1.
  int64_t below(int64_t count) { return static_cast<int64_t>(next() % static_cast<uint64_t>(count)); }
  /// low … high, both possible.
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(double probability) { return static_cast<double>(next() >> 11) * 0x1p-53 < probability; }
  template <class T> const T& of(const std::vector<T>& choices) {
    return choices[static_cast<size_t>(below(static_cast<int64_t>(choices.size())))];
  }
  std::string of(std::initializer_list<const char*> choices) {
    return *(choices.begin() + below(static_cast<int64_t>(choices.size())));
  }

 private:
  uint64_t state_;
};

}  // namespace equivalence
