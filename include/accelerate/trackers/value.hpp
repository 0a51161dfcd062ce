#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

struct TrackerValue;
using TrackerList = std::vector<TrackerValue>;
using TrackerValues = std::map<std::string, TrackerValue>;

/// What trackers take: nothing (Python's None), a truth value, a number, a text, or lists and maps of these. Made of
/// the C++ types without further ado: `{{"loss", 0.5}, {"epoch", 3}, {"note", "warm"}, {"adam", {{"beta", 0.9}}}}`; a
/// list is a std::vector.
struct ACCELERATE_API TrackerValue {
  using Any = std::variant<std::nullptr_t, bool, int64_t, double, std::string, TrackerList, TrackerValues>;
  Any value = nullptr;

  TrackerValue() = default;
  TrackerValue(std::nullptr_t) {}
  /// Whole numbers that int64_t can't hold become doubles.
  template <class T>
  requires std::is_arithmetic_v<T> TrackerValue(T number) {
    if constexpr (std::same_as<T, bool>) value = number;
    else if constexpr (std::floating_point<T>) value = static_cast<double>(number);
    else if (std::in_range<int64_t>(number)) value = static_cast<int64_t>(number);
    else value = static_cast<double>(number);
  }
  TrackerValue(const char* text) : value(std::string(text)) {}
  TrackerValue(std::string_view text) : value(std::string(text)) {}
  TrackerValue(std::string text) : value(std::move(text)) {}
  TrackerValue(TrackerList list) : value(std::move(list)) {}
  TrackerValue(TrackerValues map) : value(std::move(map)) {}
  TrackerValue(std::initializer_list<std::pair<const std::string, TrackerValue>> map) : value(TrackerValues(map)) {}
  template <class T>
  requires(!std::same_as<T, TrackerValue>) TrackerValue(const std::vector<T>& list)
      : value(TrackerList(list.begin(), list.end())) {}
  template <class T>
  requires(!std::same_as<T, TrackerValue>) TrackerValue(const std::map<std::string, T>& map)
      : value(TrackerValues(map.begin(), map.end())) {}
  template <class T> TrackerValue(const std::optional<T>& given) {
    if (given) *this = TrackerValue(*given);
  }
  /// E.g. the fields of keyword handlers (utils/kwargs_dict.hpp).
  template <class... T> TrackerValue(const std::variant<T...>& any) {
    std::visit([this](const auto& one) { *this = TrackerValue(one); }, any);
  }

  /// The text, list or map; null where it is something else.
  const std::string* text() const { return std::get_if<std::string>(&value); }
  const TrackerList* list() const { return std::get_if<TrackerList>(&value); }
  const TrackerValues* map() const { return std::get_if<TrackerValues>(&value); }
  /// A number, or a truth value as 0 or 1, as in Python; nothing where it is something else.
  std::optional<double> number() const;
  /// The same if it is whole by its type.
  std::optional<int64_t> whole() const;
};

ACCELERATE_API bool operator==(const TrackerValue& a, const TrackerValue& b);

/// A map of numbers, texts, ... as a map of values.
template <class T> TrackerValues to_tracker_values(const std::map<std::string, T>& values) {
  return TrackerValues(values.begin(), values.end());
}

}  // namespace accelerate
