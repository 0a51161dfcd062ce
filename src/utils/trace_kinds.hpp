#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

/// The subjects of a trace's spans, by the names that files have (docs/formats/profile_trace.md). Needs no LibTorch.
namespace accelerate::trace {

/// Before each name.
inline constexpr std::string_view kOurs = "accelerate::";

enum class SpanKind : uint8_t {
  unit_fetch,        ///< bytes of a unit come from where they live
  unit_wait,         ///< an operator waits for a unit
  unit_evict,        ///< a unit goes, and what was changed is stored
  unit_gather,       ///< an all-gather of shards
  gradient_reduce,   ///< of a bucket, or a unit's
  comm_wait,         ///< for a collective that is under way, or for what peers write to shared memory
  collective,        ///< any other
  checkpoint_write,  ///< a file
  checkpoint_read,
  loader_wait,  ///< the loop waits for a batch
};
inline constexpr std::array<std::string_view, 10> kKindNames = {
    "unit_fetch", "unit_wait",  "unit_evict",       "unit_gather",     "gradient_reduce",
    "comm_wait",  "collective", "checkpoint_write", "checkpoint_read", "loader_wait"};

constexpr std::string_view name_of(SpanKind kind) { return kKindNames[static_cast<size_t>(kind)]; }
constexpr std::optional<SpanKind> kind_called(std::string_view name) {
  for (size_t i = 0; i < kKindNames.size(); ++i)
    if (kKindNames[i] == name) return static_cast<SpanKind>(i);
  return std::nullopt;
}

}  // namespace accelerate::trace
