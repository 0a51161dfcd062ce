#include "parallel/zero/setting_values.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>
#include <type_traits>

#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

using Json = nlohmann::ordered_json;

enum class ValueForm { truth, whole, real, text, texts, reals, pair, any };

template <class T> constexpr ValueForm form_of() {
  if constexpr (std::is_same_v<T, bool>) return ValueForm::truth;
  else if constexpr (std::is_same_v<T, int64_t>) return ValueForm::whole;
  else if constexpr (std::is_same_v<T, double>) return ValueForm::real;
  else if constexpr (std::is_same_v<T, std::string>) return ValueForm::text;
  else if constexpr (std::is_same_v<T, std::vector<std::string>>) return ValueForm::texts;
  else if constexpr (std::is_same_v<T, std::vector<double>>) return ValueForm::reals;
  else return ValueForm::pair;
}

struct Shape {
  ValueForm form;
  bool nullable;
};

template <class T> struct Content {
  using type = T;
  static constexpr bool optional = false;
};
template <class T> struct Content<std::optional<T>> {
  using type = T;
  static constexpr bool optional = true;
};

Shape shape_of(const Row& row) {
  if (row.place) {
    static ZeroSettings somewhere = [] {
      ZeroSettings settings;
      settings.optimizer.emplace();
      settings.scheduler.emplace();
      return settings;
    }();
    return std::visit(
        [&]<class T>(T*) {
          return Shape{form_of<typename Content<T>::type>(), Content<T>::optional || row.nullable};
        },
        row.place(somewhere));
  }
  const Json fallback = json_of(row.fallback);
  const ValueForm form = fallback.is_boolean()          ? ValueForm::truth
                         : fallback.is_number_integer() ? ValueForm::whole
                         : fallback.is_number()         ? ValueForm::real
                         : fallback == "auto"           ? ValueForm::any
                         : fallback.is_string()         ? ValueForm::text
                         : fallback.is_array()          ? ValueForm::texts
                                                        : ValueForm::any;
  return {form, row.nullable || form == ValueForm::any};
}

std::vector<std::string> choices_of(const Row& row) {
  std::vector<std::string> words;
  const std::string_view text = row.choices ? row.choices : "";
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('|', begin), text.size());
    words.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::string small_letters(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

/// The truth value that pydantic makes of a value.
std::optional<bool> truth_of(const Json& value) {
  if (value.is_number()) {
    const double number = value.get<double>();
    return number == 0 ? std::optional(false) : number == 1 ? std::optional(true) : std::nullopt;
  }
  if (!value.is_string()) return std::nullopt;
  const std::string word = small_letters(value.get<std::string>());
  for (const char* yes : {"true", "on", "yes", "y", "t", "1"})
    if (word == yes) return true;
  for (const char* no : {"false", "off", "no", "n", "f", "0"})
    if (word == no) return false;
  return std::nullopt;
}

template <class Number> std::optional<Number> number_of_text(const std::string& text) {
  Number number{};
  const char *begin = text.data(), *const end = begin + text.size();
  if (begin != end && *begin == '+') ++begin;
  const auto [next, error] = std::from_chars(begin, end, number);
  if (begin == end || next != end || error != std::errc()) return std::nullopt;
  return number;
}

std::optional<int64_t> whole_of(const Json& value, bool coerces) {
  if (const auto number = whole_number(value)) return number;
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::trunc(number) != number || std::abs(number) >= 9.2e18) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (!coerces) return std::nullopt;
  if (value.is_boolean()) return value.get<bool>() ? 1 : 0;
  return value.is_string() ? number_of_text<int64_t>(value.get_ref<const std::string&>()) : std::nullopt;
}

std::optional<double> real_of(const Json& value, bool coerces) {
  if (value.is_number()) return value.get<double>();
  if (!coerces) return std::nullopt;
  if (value.is_boolean()) return value.get<bool>() ? 1.0 : 0.0;
  return value.is_string() ? number_of_text<double>(value.get_ref<const std::string&>()) : std::nullopt;
}

bool in_range(const Row& row, double number) {
  if (std::isnan(number) || (std::isinf(number) && !(row.infinite && number > 0))) return false;
  return (row.above ? number > row.least : number >= row.least) && (row.below ? number < row.most : number <= row.most);
}

std::string range_text(const Row& row) {
  const bool from = std::isfinite(row.least), to = std::isfinite(row.most);
  if (from && to) return fmt::format(" from {} to {}{}", row.least, row.below ? "just below " : "", row.most);
  if (from) return fmt::format(" {} {}", row.above ? "above" : "of at least", row.least);
  return to ? fmt::format(" of at most {}", row.most) : "";
}

std::string expectation(const Row& row, const Shape& shape) {
  std::string text;
  const auto words = choices_of(row);
  switch (shape.form) {
    case ValueForm::truth:
      text = "true or false";
      break;
    case ValueForm::whole:
      text = "a whole number" + range_text(row);
      break;
    case ValueForm::real:
      text = (row.infinite ? "a number" : "a finite number") + range_text(row);
      break;
    case ValueForm::text:
      text = words.empty() ? "a text" : fmt::format("one of {}", fmt::join(words, ", "));
      break;
    case ValueForm::texts:
      text = "a list of texts" + (words.empty() ? "" : fmt::format(" or {}", fmt::join(words, ", ")));
      break;
    case ValueForm::reals:
      text = "a number" + range_text(row) + ", or a list of one for each group";
      break;
    case ValueForm::pair:
      text = "a list of two numbers" + range_text(row);
      break;
    case ValueForm::any:
      break;
  }
  return text + (shape.nullable ? ", or null" : "");
}

/// Numbers of a list, or one alone.
std::optional<Json> numbers_of(const Row& row, const Json& given, bool coerces) {
  Json list = Json::array();
  const auto add = [&](const Json& element) {
    const auto number = real_of(element, coerces);
    if (!number || !in_range(row, *number)) return false;
    list.push_back(*number);
    return true;
  };
  if (!given.is_array()) return add(given) ? std::optional(list) : std::nullopt;
  for (const auto& element : given)
    if (!add(element)) return std::nullopt;
  return list.empty() ? std::nullopt : std::optional(list);
}

}  // namespace

Json json_of(const char* text) {
  auto value = parse_json<Json>(text);
  if (value.is_discarded()) raise<InternalError>("DeepSpeed's settings: the table has '{}', which is no JSON", text);
  return value;
}

bool takes_auto(const Row& row) {
  if (!row.place) return true;
  const auto words = choices_of(row);
  return std::find(words.begin(), words.end(), "auto") != words.end();
}

std::optional<ReadValue> read_value(const Row& row, const Section& section, const Json& given, std::string& expected) {
  const Shape shape = shape_of(row);
  expected = expectation(row, shape);
  if (given.is_null()) return shape.nullable ? std::optional(ReadValue{}) : std::nullopt;
  const bool coerces = section.classed && !(row.no_truth && given.is_boolean());
  switch (shape.form) {
    case ValueForm::truth: {
      if (given.is_boolean()) return ReadValue{given, ""};
      const bool by_word = section.lenient && (given == "true" || given == "false");
      const auto value = section.classed || by_word ? truth_of(given) : std::nullopt;
      if (!value) return std::nullopt;
      return ReadValue{
          *value, by_word ? fmt::format("{} is the text {}; it is read as {}", row.key, show_json(given), *value) : ""};
    }
    case ValueForm::whole: {
      const auto value = whole_of(given, coerces);
      if (!value || !in_range(row, static_cast<double>(*value))) return std::nullopt;
      return ReadValue{*value, ""};
    }
    case ValueForm::real: {
      const auto value = real_of(given, coerces);
      if (!value || !in_range(row, *value)) return std::nullopt;
      return ReadValue{*value, ""};
    }
    case ValueForm::text: {
      if (!given.is_string()) return std::nullopt;
      const auto words = choices_of(row);
      if (words.empty()) return ReadValue{given, ""};
      for (const auto& word : words) {
        const auto& text = given.get_ref<const std::string&>();
        if (row.any_case ? small_letters(word) == small_letters(text) : word == text) return ReadValue{word, ""};
      }
      return std::nullopt;
    }
    case ValueForm::texts: {
      Json list = Json::array();
      if (given.is_string()) {
        if (!section.classed && !(takes_auto(row) && given == "auto")) return std::nullopt;
        list.push_back(given);
      } else if (!given.is_array()) {
        return std::nullopt;
      } else {
        std::set<std::string> seen;
        for (const auto& element : given) {
          if (!element.is_string()) return std::nullopt;
          if (seen.insert(element.get<std::string>()).second) list.push_back(element);
        }
      }
      return ReadValue{std::move(list), ""};
    }
    case ValueForm::reals:
    case ValueForm::pair: {
      auto list = numbers_of(row, given, coerces);
      if (!list || (shape.form == ValueForm::pair && (list->size() != 2 || !given.is_array()))) return std::nullopt;
      return ReadValue{*std::move(list), ""};
    }
    case ValueForm::any:
      break;
  }
  return ReadValue{given, ""};
}

void set_place(const Place& place, const Json& value) {
  std::visit(
      [&]<class T>(T* to) {
        if (!value.is_null()) *to = value.get<typename Content<T>::type>();
        else if constexpr (Content<T>::optional) to->reset();
      },
      place);
}

Json value_at(const Place& place) {
  return std::visit(
      []<class T>(const T* from) {
        if constexpr (Content<T>::optional) return *from ? Json(**from) : Json();
        else return Json(*from);
      },
      place);
}

}  // namespace accelerate::zero
