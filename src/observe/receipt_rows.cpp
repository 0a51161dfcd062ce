#include "observe/receipt_rows.hpp"

#include "input/json.hpp"
#include "utils/environment.hpp"

namespace accelerate::receipts {
namespace {

/// The launcher's sources of the variables' values: {"FSDP_OFFLOAD_PARAMS": "flag --fsdp_offload_params"}. Without it a
/// variable is the user's own.
std::string source_of(const char* variable) {
  if (const auto sources = environment::text("ACCELERATE_RECEIPTS_SOURCES")) {
    const auto known = parse_json<nlohmann::json>(*sources);
    if (known.is_object() && known.contains(variable) && known[variable].is_string()) return known[variable];
  }
  return fmt::format("variable {}", variable);
}

}  // namespace

Receipt detail::make_one(const char* variable, bool variable_wins, Asked asked, Deed did) {
  Receipt receipt{.value = std::move(asked.value), .source = "default", .state = did.state};
  const auto text = variable ? environment::text(variable) : std::nullopt;
  if (asked.by_call) receipt.source = "call";
  if (text && (!asked.by_call || variable_wins))
    if (auto source = source_of(variable); source != "default") receipt.source = std::move(source);
  if (text && receipt.source != "call") receipt.value = *text;
  receipt.effect = std::move(did.text);
  return receipt;
}

}  // namespace accelerate::receipts
