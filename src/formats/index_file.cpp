#include "formats/index_file.hpp"

#include <algorithm>
#include <fstream>

#include <nlohmann/json.hpp>

#include "utils/raise.hpp"

namespace accelerate::formats {

namespace fs = std::filesystem;

std::map<std::string, std::string> read_index(const fs::path& path) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("checkpoint index '{}': {}", path.string(), fmt::format(what, std::forward<Args>(args)...));
  };
  std::ifstream file(path);
  if (!file) fail("can't open it. Check the path and the rights.");
  const auto root = nlohmann::json::parse(file, nullptr, false);
  if (root.is_discarded()) fail("it is not valid JSON. It is probably truncated: copy or download it again.");
  const bool inside = root.is_object() && root.contains("weight_map");
  const auto& map = inside ? root["weight_map"] : root;
  const bool plain = map.is_object() && !map.empty() &&
                     std::all_of(map.begin(), map.end(), [](const auto& value) { return value.is_string(); });
  if (!map.is_object() || (!inside && !plain))
    fail(
        "it has no object \"weight_map\" from tensor names to file names, and is no such object itself. Is it the "
        "index of another format?");
  std::map<std::string, std::string> files;
  for (const auto& [name, value] : map.items()) {
    if (!value.is_string())
      fail("tensor '{}' maps to {}, expected a file name.", name,
           value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    const fs::path file_name = value.get<std::string>();
    if (file_name.empty() || file_name.filename() != file_name || file_name == "." || file_name == "..")
      fail("tensor '{}' maps to '{}', which is not the plain name of a file beside the index.", name,
           file_name.string());
    files.emplace(name, file_name.string());
  }
  return files;
}

bool is_index_name(const fs::path& path) {
  const std::string name = path.filename().string();
  return name == "index.json" || name.ends_with(".index.json");
}

}  // namespace accelerate::formats
