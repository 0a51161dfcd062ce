#include <cstdlib>
#include <string_view>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "launch/machines/messages.hpp"

// Any bytes are messages, a line each, or a LaunchError; and whatever machines say of themselves, the coordinator
// decides something that the others can read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate::launcher;
  using accelerate::LaunchError;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  Coordinator::Clock::time_point now{};
  Coordinator coordinator({.min_machines = 2, .max_machines = 3, .max_restarts = 1}, now);
  std::vector<Node> nodes;
  while (!rest.empty()) {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    const auto try_to = [&](auto&& read) {
      try {
        read();
      } catch (const LaunchError&) {
      }
    };
    try_to([&] { parse_event(line); });
    try_to([&] { parse_decision(line); });
    try_to([&] { parse_place(line); });
    // A line is the latest word of the machine of its number, or of a new one.
    for (int64_t id = 1; id <= static_cast<int64_t>(nodes.size()) + 1 && id <= 4; ++id)
      try_to([&] {
        const auto node = parse_node(line, id);
        if (id > static_cast<int64_t>(nodes.size())) nodes.push_back(node);
        else nodes[static_cast<size_t>(id - 1)] = node;
      });
    now += std::chrono::seconds(7);
    coordinator.step(nodes, now);
    const auto text =
        nlohmann::json(coordinator.decision()).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    if (parse_decision(text).world_size != coordinator.decision().world_size || coordinator.decision().world_size < 0)
      std::abort();
  }
  return 0;
}
