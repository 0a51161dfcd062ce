#include "launch/machines/messages.hpp"

#include <algorithm>

#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

using nlohmann::json;

constexpr int64_t kMostRanks = 1'000'000;  // of a machine; more than any has, and sums of them don't overflow

[[noreturn]] void refuse_message(std::string_view what, std::string_view text, std::string_view why) {
  raise<LaunchError>(
      "{} is {}, which is no such message: {}. Is the same version of accelerate installed on all machines?", what,
      show_json(json(text.substr(0, 200)), 200), why);
}

/// The JSON library would make of any number what is asked for; outside of the type's range that is undefined.
bool numbers_are_whole(const json& value) {
  if (value.is_structured()) return std::all_of(value.begin(), value.end(), numbers_are_whole);
  return !value.is_number() || whole_number(value).has_value();
}

/// The message that `read` makes of a text's JSON.
template <class Read> auto message_of(std::string_view what, std::string_view text, const Read& read) {
  std::string problem;
  const auto value = parse_json<json>(text, &problem);
  if (problem.empty() && !numbers_are_whole(value)) problem = "a number in it is not whole, or too large";
  if (!problem.empty()) refuse_message(what, text, problem);
  try {
    return read(value);
  } catch (const json::exception& error) {
    refuse_message(what, text, error.what());
  }
}

void check_range(std::string_view what, std::string_view text, const char* field, int64_t number, int64_t least,
                 int64_t most) {
  if (number < least || number > most)
    refuse_message(what, text, fmt::format("{} is {}, expected {} to {}", field, number, least, most));
}

Round round_of(const json& event) {
  return {event.at("number"),      event.at("restarts"),    event.at("group_rank"),      event.at("group_world_size"),
          event.at("first_rank"),  event.at("world_size"),  event.at("first_role_rank"), event.at("role_world_size"),
          event.at("master_addr"), event.at("master_port"), event.at("run_id")};
}

}  // namespace

AgentEvent parse_event(std::string_view line) {
  return message_of("what accelerate-agent says", line, [&](const json& value) -> AgentEvent {
    const std::string name = value.at("event");
    if (name == "round") return {.kind = AgentEvent::Kind::round, .round = round_of(value), .code = 0, .why = {}};
    if (name == "recall") return {.kind = AgentEvent::Kind::recall, .round = {}, .code = 0, .why = value.at("why")};
    if (name == "again") return {};
    if (name != "closed") refuse_message("what accelerate-agent says", line, "there is no such event");
    return {.kind = AgentEvent::Kind::closed, .round = {}, .code = value.at("code"), .why = value.at("why")};
  });
}

Node parse_node(std::string_view text, int64_t id) {
  const auto what = fmt::format("what machine {} says of itself", id);
  auto node = message_of(what, text, [](const json& value) { return value.get<Node>(); });
  check_range(what, text, "id", node.id, id, id);
  check_range(what, text, "local_world_size", node.local_world_size, 1, kMostRanks);
  check_range(what, text, "kind", node.kind, 0, 100);
  return node;
}

Decision parse_decision(std::string_view text) {
  return message_of("what the host of the rendezvous has decided", text,
                    [](const json& value) { return value.get<Decision>(); });
}

std::pair<std::string, int64_t> parse_place(std::string_view text) {
  return message_of("where the ranks' store is", text, [](const json& value) -> std::pair<std::string, int64_t> {
    return {value.at("address"), value.at("port")};
  });
}

}  // namespace accelerate::launcher
