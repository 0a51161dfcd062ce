#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

class GeneralTracker;  // accelerate/trackers/tracker.hpp
struct TrackerValue;
using TrackerList = std::vector<TrackerValue>;
using TrackerValues = std::map<std::string, TrackerValue>;
namespace detail {
template <class T> concept NoTrackerValue = !std::is_same_v<T, TrackerValue>;
}

/// A value that trackers take: nothing (Python's None), a truth value, a number, a text, or lists and maps of these.
/// C++'s types convert to it: `{{"loss", 0.5}, {"epoch", 3}, {"adam", {{"beta", 0.9}}}}`; a list is a std::vector.
struct ACCELERATE_API TrackerValue {
  using Any = std::variant<std::nullptr_t, bool, int64_t, double, std::string, TrackerList, TrackerValues>;
  Any value = nullptr;

  TrackerValue() = default;
  TrackerValue(std::nullptr_t) {}
  /// Whole numbers that int64_t can't hold become doubles.
  template <class T>
  requires std::is_arithmetic_v<T> TrackerValue(T number) {
    if constexpr (std::is_same_v<T, bool>) value = number;
    else if constexpr (std::is_floating_point_v<T>) value = static_cast<double>(number);
    else if (std::in_range<int64_t>(number)) value = static_cast<int64_t>(number);
    else value = static_cast<double>(number);
  }
  TrackerValue(const char* text) : value(std::string(text)) {}
  TrackerValue(std::string_view text) : value(std::string(text)) {}
  TrackerValue(std::string text) : value(std::move(text)) {}
  TrackerValue(TrackerList list) : value(std::move(list)) {}
  TrackerValue(TrackerValues map) : value(std::move(map)) {}
  TrackerValue(std::initializer_list<std::pair<const std::string, TrackerValue>> map) : value(TrackerValues(map)) {}
  template <detail::NoTrackerValue T>
  TrackerValue(const std::vector<T>& list) : value(TrackerList(list.begin(), list.end())) {}
  template <detail::NoTrackerValue T>
  TrackerValue(const std::map<std::string, T>& map) : value(TrackerValues(map.begin(), map.end())) {}
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
  std::optional<int64_t> whole() const;  ///< the same if it is whole by its type
};
ACCELERATE_API bool operator==(const TrackerValue& a, const TrackerValue& b);

/// A map of numbers, texts, ... as a map of values.
template <class T> TrackerValues to_tracker_values(const std::map<std::string, T>& values) {
  return TrackerValues(values.begin(), values.end());
}
/// Keyword arguments by tracker: {{"wandb", {{"tags", tags}}}}.
using TrackerKwargs = std::map<std::string, TrackerValues>;

/// One element of AcceleratorOptions::log_with: a name, "all" (all that are available), or a tracker of your own.
class ACCELERATE_API TrackerChoice {
 public:
  TrackerChoice(const char* name) : name_(name) {}
  TrackerChoice(std::string name) : name_(std::move(name)) {}
  /// @throws ConfigError for null
  template <class Tracker>
  requires std::is_base_of_v<GeneralTracker, Tracker> TrackerChoice(std::shared_ptr<Tracker> tracker)
      : object_(std::move(tracker)) {
    take_name();
  }
  const std::string& name() const { return name_; }
  const std::shared_ptr<GeneralTracker>& object() const { return object_; }  ///< null where there is only a name
  bool operator==(const TrackerChoice&) const = default;

 private:
  void take_name();
  std::string name_;
  std::shared_ptr<GeneralTracker> object_;
};

}  // namespace accelerate
