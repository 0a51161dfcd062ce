#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

#include "accelerate/utils/export.hpp"

/// The one way in for JSON that others may have written. Needs no LibTorch.
namespace accelerate {

struct JsonRules {
  size_t deepest = 64;       ///< lists and objects in each other: readers, copies and writers are recursive
  bool unique_keys = false;  ///< else the last one counts, as in Python
};

/// Parses the whole of `text`. Takes time and memory in proportion to its size: deep nesting is refused, and values
/// that take many times the memory of their text are where they are too many.
/// @return a discarded value where it is not valid
/// @param problem  what is wrong, to come behind the name of the text: "is not valid JSON (...)"
template <class Json>
Json parse_json(std::string_view text, std::string* problem = nullptr, const JsonRules& rules = {});

extern template ACCELERATE_API nlohmann::json parse_json(std::string_view, std::string*, const JsonRules&);
extern template ACCELERATE_API nlohmann::ordered_json parse_json(std::string_view, std::string*, const JsonRules&);

/// The same for an object of very many members: each is given to `take` as soon as it is whole and then forgotten, so
/// that they cost neither the memory nor the time of a tree of all. Whether names are unique is for `take` to say.
/// @return what is wrong, also of a value that is no object; errors of `take` come out
ACCELERATE_API std::string parse_json_members(
    std::string_view text, const std::function<void(const std::string& name, const nlohmann::json& value)>& take,
    const JsonRules& rules = {});

/// An object that is too large for memory, read piece by piece.
struct JsonStream {
  /// The next piece of the text, which stays until it is asked again; empty at the end.
  std::function<std::string_view()> more;
  /// The member that is a list of very many elements: each is given to `take_element`, which may change it, as soon as
  /// it is whole.
  std::string list;
  std::function<void(nlohmann::json& element)> take_element;
  /// The other members, and the list when it has ended, as an empty one.
  std::function<void(const std::string& name, const nlohmann::json& value)> take_member;
};

/// Takes as much memory as the largest of what is given away. @return as parse_json_members()
ACCELERATE_API std::string parse_json_stream(const JsonStream& stream, const JsonRules& rules = {});

/// A value in a message, cut before it is written: short whatever it holds.
template <class Json> std::string show_json(const Json& value, size_t most_bytes = 60);

extern template ACCELERATE_API std::string show_json(const nlohmann::json&, size_t);
extern template ACCELERATE_API std::string show_json(const nlohmann::ordered_json&, size_t);

/// A whole number that fits, without the silent conversions of get<int64_t>().
template <class Json> std::optional<int64_t> whole_number(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.template get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
    return std::nullopt;
  return value.template get<int64_t>();
}

}  // namespace accelerate
