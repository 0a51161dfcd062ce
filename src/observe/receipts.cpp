#include "accelerate/utils/receipts.hpp"

#include <algorithm>
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

constexpr ReceiptState kStates[] = {ReceiptState::acted, ReceiptState::not_due, ReceiptState::without_effect};

ReceiptState state_called(const std::string& name) {
  for (const auto state : kStates)
    if (name == to_string(state)) return state;
  raise<ConfigError>("receipts: the state is '{}', expected acted, not_due or without_effect", name);
}

/// The longest text of a column, within reason: longer ones push what follows to the right.
size_t width_of(const std::vector<Receipt>& rows, std::string Receipt::*column) {
  constexpr size_t kMost = 48;
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, std::min((row.*column).size(), kMost));
  return width;
}

}  // namespace

const char* to_string(ReceiptState state) {
  switch (state) {
    case ReceiptState::acted:
      return "acted";
    case ReceiptState::not_due:
      return "not_due";
    case ReceiptState::without_effect:
      return "without_effect";
  }
  return "?";
}

const Receipt& Receipts::operator[](std::string_view setting) const {
  for (const auto& entry : entries)
    if (entry.setting == setting) return entry;
  raise<ConfigError>("receipts: there is no setting '{}'; entries lists them", setting);
}

std::vector<Receipt> Receipts::without_effect() const {
  std::vector<Receipt> found;
  for (const auto& entry : entries)
    if (entry.asked() && entry.state == ReceiptState::without_effect) found.push_back(entry);
  return found;
}

std::string Receipts::text() const {
  std::vector<Receipt> rows{
      {.setting = "setting", .value = "value", .source = "asked for by", .effect = "what it did"}};
  size_t acted = 0;
  for (const auto& entry : entries) {
    if (!entry.asked()) continue;
    auto& row = rows.emplace_back(entry);
    if (row.source == "call") row.source = "the program";
    if (row.state == ReceiptState::without_effect) row.effect = "NO EFFECT: " + row.effect;
    acted += row.state == ReceiptState::acted;
  }
  const size_t asked = rows.size() - 1, idle = without_effect().size(), rest = entries.size() - asked;
  if (asked == 0)
    return fmt::format("Receipts: nobody asked for anything, all {} settings are at their defaults.\n", rest);
  std::string text = "Receipts: what each setting that was asked for did, as the main process saw it\n";
  const size_t settings = width_of(rows, &Receipt::setting), values = width_of(rows, &Receipt::value),
               sources = width_of(rows, &Receipt::source);
  for (const auto& row : rows)
    text += fmt::format("  {:{}}  {:{}}  {:{}}  {}\n", row.setting, settings, row.value, values, row.source, sources,
                        row.effect);
  text += fmt::format("Of {} asked for, {} acted", asked, acted);
  if (idle > 0) text += fmt::format(", {} had NO EFFECT", idle);
  if (const size_t waiting = asked - acted - idle; waiting > 0) text += fmt::format(", {} had nothing to do", waiting);
  return text + fmt::format(". {} more are at their defaults (--json lists them).\n", rest);
}

std::string Receipts::json() const {
  auto rows = nlohmann::ordered_json::array();
  for (const auto& entry : entries)
    rows.push_back({{"setting", entry.setting},
                    {"value", entry.value},
                    {"source", entry.source},
                    {"expected", entry.expected},
                    {"state", to_string(entry.state)},
                    {"effect", entry.effect}});
  const nlohmann::ordered_json all{{"receipts", rows}, {"without_effect", without_effect().size()}};
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace);  // paths need not be UTF-8
}

Receipts Receipts::from_json(const std::string& text) {
  Receipts receipts;
  try {
    const auto parsed = parse_json<nlohmann::json>(text);
    for (const auto& row : parsed.at("receipts"))
      receipts.entries.push_back({.setting = row.at("setting"),
                                  .value = row.at("value"),
                                  .source = row.at("source"),
                                  .expected = row.at("expected"),
                                  .state = state_called(row.at("state")),
                                  .effect = row.at("effect")});
  } catch (const nlohmann::json::exception& error) {
    raise<ConfigError>("receipts: found a text that is no JSON of receipts, expected what Receipts::json() wrote: {}",
                       error.what());
  }
  return receipts;
}

}  // namespace accelerate
