#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "launch/job/rendezvous.hpp"
#include "launch/machines/coordinator.hpp"

/// Reads the messages of the launcher, its agent and the other machines' agents to each other: JSON, which the network
/// may have brought. All functions throw LaunchError for anything else.
namespace accelerate::launcher {

/// A line that an agent tells its launcher.
struct AgentEvent {
  enum class Kind { round, recall, again, closed };
  Kind kind = Kind::again;
  Round round;       ///< of `round`: this machine takes part in it
  int64_t code = 0;  ///< of `closed`: the job's exit code
  std::string why;   ///< of `recall` and `closed`
};
AgentEvent parse_event(std::string_view line);

/// The message of machine `id` about itself in the store.
Node parse_node(std::string_view text, int64_t id);
Decision parse_decision(std::string_view text);
/// Address and port of a store.
std::pair<std::string, int64_t> parse_place(std::string_view text);

}  // namespace accelerate::launcher
