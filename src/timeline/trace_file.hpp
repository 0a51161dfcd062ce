#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

/// The Chrome trace of one rank, as Kineto writes it: events, and in the head who the rank was.
namespace accelerate::timeline {

struct TraceStep {
  int64_t number = 0;
  int64_t begin = 0, end = 0;  ///< nanoseconds, on the rank's own clock, since TraceHead::base
};

/// The head of a trace. Beside PyTorch's fields there are ours: `accelerate_clock`, `accelerate_steps`.
struct TraceHead {
  std::filesystem::path file;
  int64_t rank = 0;
  bool knows_rank = false;  ///< false: the rank is guessed from the file's name
  int64_t world_size = 0;   ///< 0: not known
  std::string backend, host;
  int64_t base = 0;  ///< nanoseconds since 1970 to which the times of events are added
  bool knows_clock = false;
  int64_t clock_offset = 0, clock_error = 0;  ///< nanoseconds: what to add to get rank 0's clock, and how sure that is
  std::vector<TraceStep> steps;
};

/// One event that lasts ("ph":"X").
struct Lasting {
  const std::string& category;
  const std::string& name;
  int64_t begin = 0, end = 0;  ///< nanoseconds since TraceHead::base
};

/// A time of an event, which files have in microseconds.
int64_t nanoseconds(const nlohmann::json& microseconds);
/// The event, if it lasts and is whole.
std::optional<Lasting> lasting(const nlohmann::json& event);

/// Reads a file in pieces; it takes as much memory as its largest event. Each event is given to `take`, which may
/// change it. @throws CheckpointError for what can't be read or is no trace
TraceHead read_trace(const std::filesystem::path& file, const std::function<void(nlohmann::json& event)>& take);

/// The traces in a folder: profile_<rank>.json, else *.pt.trace.json as PyTorch's own handler names them; by rank.
/// @throws CheckpointError where there are none
std::vector<std::filesystem::path> traces_in(const std::filesystem::path& folder);

}  // namespace accelerate::timeline
