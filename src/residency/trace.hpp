#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace accelerate::residency {

/// The order in which units are touched, and what it says about the future: programs repeat themselves, so what
/// followed the last time that we were at this point follows again. No iteration needs to be marked; when the order
/// changes, the new one is found as soon as two touches in a row are known.
class Trace {
 public:
  static constexpr int64_t kNever = INT64_MAX;

  /// The program went on to `unit`, another one than before.
  void record(int32_t unit);

  /// The `ahead`-th next unit (1: the very next one); -1 when unknown.
  int32_t next(int64_t ahead) const;

  /// How many steps until `unit` is touched again; kNever when it is not expected.
  int64_t distance(int32_t unit) const;

  /// How often the prediction of the next unit was wrong or missing.
  int64_t surprises() const { return surprises_; }

 private:
  std::vector<int32_t> history_;
  std::unordered_map<uint64_t, int64_t> last_seen_;  ///< (previous, unit) -> its latest position
  int64_t match_ = -1;                               ///< the earlier position that looks like the present one
  int64_t surprises_ = 0;
};

}  // namespace accelerate::residency
