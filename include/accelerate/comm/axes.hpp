#pragma once

#include <cstdint>
#include <initializer_list>

#include "accelerate/utils/export.hpp"

namespace accelerate::comm {

/// The axes over which a job's ranks are laid out, outermost first.
enum class Axis : uint8_t { pp, dp_replicate, dp_shard, cp, sp, ep, tp };
/// "dp_shard"
ACCELERATE_API const char* name_of(Axis axis);

/// A set of axes.
class Axes {
 public:
  constexpr Axes() = default;
  constexpr Axes(std::initializer_list<Axis> axes) {
    for (const Axis axis : axes) bits_ = static_cast<uint8_t>(bits_ | bit(axis));
  }
  constexpr bool has(Axis axis) const { return (bits_ & bit(axis)) != 0; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr Axes operator|(Axes other) const {
    other.bits_ = static_cast<uint8_t>(other.bits_ | bits_);
    return other;
  }
  /// Without those.
  constexpr Axes operator-(Axes other) const {
    other.bits_ = static_cast<uint8_t>(bits_ & ~other.bits_);
    return other;
  }
  constexpr auto operator<=>(const Axes&) const = default;

 private:
  static constexpr uint8_t bit(Axis axis) { return static_cast<uint8_t>(1U << static_cast<unsigned>(axis)); }
  uint8_t bits_ = 0;
};

/// Ranks that differ in these read other samples, …
inline constexpr Axes kSamples{Axis::dp_replicate, Axis::dp_shard};
/// … and in these other samples, or other parts of one: losses and gradients are averaged over them.
inline constexpr Axes kTokens{Axis::dp_replicate, Axis::dp_shard, Axis::cp, Axis::sp};
inline constexpr Axes kAllAxes = kTokens | Axes{Axis::pp, Axis::ep, Axis::tp};

}  // namespace accelerate::comm
