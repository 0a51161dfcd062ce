#pragma once

#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "parallel/zero/settings_table.hpp"

/// A value of the document against its row.
namespace accelerate::zero {

struct ReadValue {
  nlohmann::ordered_json value;  ///< of the row's type; null: absent
  std::string warning;
};

/// @return nothing when it is of another type or out of range; `expected` then says what would be right
std::optional<ReadValue> read_value(const Row& row, const Section& section, const nlohmann::ordered_json& given,
                                    std::string& expected);

/// JSON of the table.
nlohmann::ordered_json json_of(const char* text);

/// "auto" is a value of the row, and not what DeepSpeed's callers have to fill.
bool takes_auto(const Row& row);

/// `value` is of the place's type. A null empties an optional, and leaves everything else alone.
void set_place(const Place& place, const nlohmann::ordered_json& value);
nlohmann::ordered_json value_at(const Place& place);

}  // namespace accelerate::zero
