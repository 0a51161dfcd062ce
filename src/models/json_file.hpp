#pragma once

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <system_error>

#include <nlohmann/json.hpp>

#include "accelerate/error.hpp"
#include "accelerate/gguf.hpp"

namespace accelerate::models {

inline std::string read_text_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path))
    throw CheckpointError("can't open '" + path.string() + "': " + std::strerror(errno) + ". Is this the folder of a saved model?");
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text_file(const std::filesystem::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw CheckpointError("can't write '" + path.string() + "': " + std::strerror(errno) + ". Check the rights and the free space of its folder.");
}

inline void create_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw CheckpointError("can't create the folder '" + folder.string() + "': " + error.message() + ".");
}

/// The file that holds a model's config.json: the model itself if it is a .gguf file.
inline std::filesystem::path config_path(const std::filesystem::path& model) { return model.extension() == ".gguf" ? model : model / "config.json"; }

/// A JSON object in a file, whose fields are read with their types checked. Of a .gguf file it is the config.json that its metadata amounts to.
class JsonFile {
 public:
  explicit JsonFile(std::filesystem::path path)
      : path_(std::move(path)), root_(nlohmann::ordered_json::parse(path_.extension() == ".gguf" ? GgufFile(path_).config_json() : read_text_file(path_), nullptr, false)) {
    if (!root_.is_object()) throw CheckpointError("'" + path_.string() + "': it is not a JSON object. It is probably truncated: copy or download it again.");
  }

  const nlohmann::ordered_json& root() const { return root_; }

  /// The object below a key, which must be there.
  JsonFile at(const char* key) const {
    const auto found = root_.find(key);
    if (found == root_.end() || !found->is_object()) fail(key, found == root_.end() ? nlohmann::ordered_json() : *found, "an object");
    return JsonFile(path_, *found);
  }

  /// Leaves `value` as it is where the key is missing or null.
  template <class T>
  void read(const char* key, T& value) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    const bool fits = std::is_same_v<T, bool>          ? found->is_boolean()
                      : std::is_same_v<T, std::string> ? found->is_string()
                      : std::is_integral_v<T>          ? found->is_number_integer()
                                                       : found->is_number();
    constexpr const char* kExpected = std::is_same_v<T, bool> ? "true or false" : std::is_same_v<T, std::string> ? "a text" : std::is_integral_v<T> ? "an integer" : "a number";
    if (!fits) fail(key, *found, kExpected);
    value = found->get<T>();
  }
  template <class T>
  void read(const char* key, std::optional<T>& value) const {
    T inner{};
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    read(key, inner);
    value = inner;
  }

  /// A token is given as text or as an object with "content".
  void read_token(const char* key, std::string& token) const {
    const auto found = root_.find(key);
    if (found == root_.end() || found->is_null()) return;
    const auto& value = found->is_object() && found->contains("content") ? (*found)["content"] : *found;
    if (!value.is_string()) fail(key, value, "a token's text");
    token = value.get<std::string>();
  }

  [[noreturn]] void fail(const std::string& key, const nlohmann::ordered_json& found, const std::string& expected) const {
    throw CheckpointError("'" + path_.string() + "': " + key + " is " + found.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + ", expected " + expected + ".");
  }

 private:
  JsonFile(std::filesystem::path path, nlohmann::ordered_json root) : path_(std::move(path)), root_(std::move(root)) {}

  std::filesystem::path path_;
  nlohmann::ordered_json root_;
};

}  // namespace accelerate::models
