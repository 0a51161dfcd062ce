#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "input/json.hpp"
#include "utils/raise.hpp"

namespace accelerate::bigmodel {

/// The fields of a config.json, with the defaults of the library that wrote it and their types checked.
class Config {
 public:
  explicit Config(nlohmann::json root) : root_(std::move(root)) {
    if (!root_.is_object())
      throw CheckpointError(
          "config.json: it is not a JSON object. It is probably truncated: copy or download it again.");
  }

  /// Reads `alias` as `key`: transformers takes both names of a field, and of two the alias.
  void rename(const char* alias, const char* key) {
    if (const auto found = root_.find(alias); found != root_.end()) root_[key] = *found;
  }

  /// Sizes and counts: 0 or more, and small enough that a product of some is no overflow.
  int64_t size(const char* key, int64_t otherwise) const {
    const auto* value = find(key);
    if (!value) return otherwise;
    constexpr int64_t kLargest = int64_t{1} << 40;
    const int64_t number = whole_number(*value).value_or(-1);
    if (number < 0 || number > kLargest) fail(key, *value, "a size from 0 to 2^40");
    return number;
  }
  /// How many times something is built. A number that would fill the memory is a mistake.
  int64_t count(const char* key, int64_t otherwise) const {
    const int64_t number = size(key, otherwise);
    constexpr int64_t kMost = 10'000;
    if (number > kMost) fail(key, *find(key), "a count of at most 10000");
    return number;
  }
  /// A divisor: 1 or more.
  int64_t divisor(const char* key, int64_t otherwise) const {
    const int64_t number = size(key, otherwise);
    if (number == 0) fail(key, number, "1 or more");
    return number;
  }
  /// Height and width, which may be given as one number.
  std::pair<int64_t, int64_t> sides(const char* key, int64_t otherwise) const {
    const auto* value = find(key);
    if (!value || !value->is_array()) return {divisor(key, otherwise), divisor(key, otherwise)};
    const auto both = counts(key, {});
    if (both.size() != 2) fail(key, *value, "one number, or height and width");
    return {both[0], both[1]};
  }
  double number(const char* key, double otherwise) const {
    const auto* value = find(key);
    if (!value) return otherwise;
    if (!value->is_number()) fail(key, *value, "a number");
    return value->get<double>();
  }
  bool flag(const char* key, bool otherwise) const {
    const auto* value = find(key);
    if (!value) return otherwise;
    if (!value->is_boolean()) fail(key, *value, "true or false");
    return value->get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    const auto* value = find(key);
    if (!value) return otherwise;
    if (!value->is_string()) fail(key, *value, "a text");
    return value->get<std::string>();
  }
  std::vector<int64_t> counts(const char* key, std::vector<int64_t> otherwise) const {
    const auto* value = find(key);
    if (!value) return otherwise;
    if (!value->is_array()) fail(key, *value, "a list of sizes");
    std::vector<int64_t> result;
    for (const auto& item : *value) {
      constexpr int64_t kMost = 10'000;
      result.push_back(whole_number(item).value_or(0));
      if (result.back() < 1 || result.back() > kMost || result.size() > static_cast<size_t>(kMost))
        fail(key, *value, "a list of at most 10000 sizes from 1 to 10000");
    }
    return result;
  }
  std::vector<std::string> texts(const char* key) const {
    const auto* value = find(key);
    std::vector<std::string> result;
    if (!value) return result;
    if (!value->is_array()) fail(key, *value, "a list of texts");
    for (const auto& item : *value) {
      if (!item.is_string()) fail(key, *value, "a list of texts");
      result.push_back(item.get<std::string>());
    }
    return result;
  }
  /// A config within this one; empty where there is none.
  Config inner(const char* key) const {
    const auto* value = find(key);
    return Config(value ? *value : nlohmann::json::object());
  }

  /// A field that is there without a value, where that means something else than the default.
  bool is_null(const char* key) const { return root_.contains(key) && root_[key].is_null(); }

  const nlohmann::json* find(const char* key) const {
    const auto found = root_.find(key);
    return found == root_.end() || found->is_null() ? nullptr : &*found;
  }

 private:
  [[noreturn]] void fail(const char* key, const nlohmann::json& found, const char* expected) const {
    raise<CheckpointError>("config.json: {} is {}, expected {}.", key, show_json(found, 200), expected);
  }

  nlohmann::json root_;
};

}  // namespace accelerate::bigmodel
