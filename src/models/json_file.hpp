#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "accelerate/formats/gguf.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"

namespace accelerate::models {

inline std::string read_text_file(const std::filesystem::path& path, int64_t most_bytes = kMostListBytes) {
  return read_text<CheckpointError>("", path, most_bytes, "Is this the folder of a saved model?");
}

/// The fields that a model's config does not know, kept to be written again.
inline nlohmann::ordered_json parse_fields(const std::string& text) {
  std::string problem;
  auto fields = parse_json<nlohmann::ordered_json>(text, &problem);
  if (!fields.is_object())
    raise<ConfigError>("other_fields {}, expected the text of a JSON object",
                       problem.empty() ? "is " + show_json(fields) : problem);
  return fields;
}

/// Writes a field as JsonFile::read() reads it: null stands for a value that is not given.
template <class T> void write_field(nlohmann::ordered_json& json, const char* key, const T& value) {
  json[key] = value;
}
template <class T> void write_field(nlohmann::ordered_json& json, const char* key, const std::optional<T>& value) {
  json[key] = value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

inline void write_text_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file)
    raise<CheckpointError>("can't write '{}': {}. Check the rights and the free space of its folder.", path.string(),
                           std::strerror(errno));
}

/// A model's layers at most; more would fill the memory before any weight is there.
inline constexpr int64_t kMostLayers = 10'000;

inline void create_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) raise<CheckpointError>("can't create the folder '{}': {}.", folder.string(), error.message());
}

/// config.json of a folder, or the path itself where that is no folder.
inline std::filesystem::path config_file(const std::filesystem::path& path) {
  return is_folder(path) ? path / "config.json" : path;
}

/// A JSON object in a file, whose fields are read with their types checked. For a .gguf file it is the config.json that
/// its metadata amounts to.
class JsonFile {
 public:
  explicit JsonFile(std::filesystem::path path)
      : path_(std::move(path)),
        root_(parse_json<nlohmann::ordered_json>(
            path_.extension() == ".gguf" ? GgufFile(path_).config_json() : read_text_file(path_, kMostSettingsBytes),
            &problem_)) {
    if (!root_.is_object())
      raise<CheckpointError>("'{}': it is not a JSON object{}. It is probably truncated: copy or download it again.",
                             path_.string(), problem_.empty() ? "" : ": it " + problem_);
  }

  const nlohmann::ordered_json& root() const { return root_; }

  /// The object below a key, which must be there.
  JsonFile at(const char* key) const {
    const auto found = root_.find(key);
    if (found == root_.end() || !found->is_object())
      fail(key, found == root_.end() ? nlohmann::ordered_json() : *found, "an object");
    return JsonFile(path_, *found);
  }

  /// Whether the key is there and says "none", where a missing one means a default.
  bool is_null(const char* key) const {
    const auto found = root_.find(key);
    return found != root_.end() && found->is_null();
  }

  /// Other names of fields, each before the architecture's own. transformers takes either, and the other one where both
  /// are there.
  void rename(const std::vector<std::pair<const char*, const char*>>& names) {
    for (const auto& [other, own] : names) {
      const auto found = root_.find(other);
      if (found == root_.end()) continue;
      root_[own] = nlohmann::ordered_json(*found);
      root_.erase(other);
    }
  }

  /// Leaves `value` as it is where the key is missing or null.
  template <class T> void read(const char* key, T& value) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    const bool fits = std::is_same_v<T, bool>          ? found->is_boolean()
                      : std::is_same_v<T, std::string> ? found->is_string()
                      : std::is_integral_v<T>          ? whole_number(*found).has_value()
                                                       : found->is_number();
    constexpr const char* kExpected = std::is_same_v<T, bool>          ? "true or false"
                                      : std::is_same_v<T, std::string> ? "a text"
                                      : std::is_integral_v<T>          ? "an integer"
                                                                       : "a number";
    if (!fits) fail(key, *found, kExpected);
    value = found->get<T>();
    if constexpr (std::is_integral_v<T>) check_layers(key, static_cast<int64_t>(value));
  }
  template <class T> void read(const char* key, std::optional<T>& value) const {
    T inner{};
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    read(key, inner);
    value = inner;
  }

  /// The field, or `fallback` where it is missing or null.
  template <class T> T get(const char* key, T fallback) const {
    read(key, fallback);
    return fallback;
  }
  std::string get(const char* key, const char* fallback) const { return get(key, std::string(fallback)); }
  /// A number of things, 1 or more, and small enough that a product of some is no overflow.
  int64_t size(const char* key, int64_t fallback) const {
    constexpr int64_t kLargest = int64_t{1} << 40;
    const int64_t found = get(key, fallback);
    if (found < 1 || found > kLargest) fail(key, found, "at least 1, and at most 2^40");
    return found;
  }
  /// size(), of which `whole`, the value of the field `of`, is a multiple.
  int64_t divisor(const char* key, int64_t fallback, const char* of, int64_t whole) const {
    const int64_t found = size(key, fallback);
    if (whole % found != 0) fail(key, found, fmt::format("a divisor of {}, which is {}", of, whole));
    return found;
  }
  /// Sizes of which there may be any number but none.
  std::vector<int64_t> sizes(const char* key, const std::vector<int64_t>& fallback) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return fallback;
    std::vector<int64_t> result;
    for (const auto& item : found->is_array() ? *found : nlohmann::ordered_json::array())
      result.push_back(whole_number(item).value_or(0));
    if (result.empty() || *std::min_element(result.begin(), result.end()) < 1)
      fail(key, *found, "a list of integers of at least 1");
    for (const auto size : result) check_layers(key, size);
    return result;
  }
  /// A list of numbers; empty where the key is missing or null.
  std::vector<double> numbers(const char* key) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return {};
    if (!found->is_array() ||
        !std::all_of(found->begin(), found->end(), [](const auto& item) { return item.is_number(); }))
      fail(key, *found, "a list of numbers");
    return found->template get<std::vector<double>>();
  }
  double probability(const char* key, double fallback) const {
    const double found = get(key, fallback);
    if (!(found >= 0 && found < 1)) fail(key, found, "a probability from 0 to below 1");
    return found;
  }

  /// A token is given as text or as an object with "content".
  void read_token(const char* key, std::string& token) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    const auto& value = found->is_object() && found->contains("content") ? (*found)["content"] : *found;
    if (!value.is_string()) fail(key, value, "a token's text");
    token = value.get<std::string>();
  }

  [[noreturn]] void fail(const std::string& key, const nlohmann::ordered_json& found,
                         const std::string& expected) const {
    raise<CheckpointError>("'{}': {} is {}, expected {}.", path_.string(), key.substr(0, 200), show_json(found, 200),
                           expected);
  }

 private:
  /// Layers and experts are made, each a few KB, before anybody can see that the files have no weights for them.
  void check_layers(std::string_view key, int64_t count) const {
    const bool counts = key.find("layer") != key.npos || key.find("experts") != key.npos || key == "depths";
    if (counts && count > kMostLayers) fail(std::string(key), count, fmt::format("at most {}", kMostLayers));
  }

  JsonFile(std::filesystem::path path, nlohmann::ordered_json root) : path_(std::move(path)), root_(std::move(root)) {}

  std::filesystem::path path_;
  std::string problem_;  ///< while it is made
  nlohmann::ordered_json root_;
};

}  // namespace accelerate::models
