#include "formats/index_file.hpp"

#include <algorithm>
#include <set>

#include "input/json.hpp"
#include "input/read_file.hpp"

namespace accelerate::formats {

namespace fs = std::filesystem;

std::map<std::string, std::string> read_index(const fs::path& path) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("checkpoint index '{}': {}", path.string(), fmt::format(what, std::forward<Args>(args)...));
  };
  std::string problem;
  const auto root =
      parse_json<nlohmann::json>(read_text<CheckpointError>("checkpoint index", path, kMostListBytes), &problem,
                                 {.unique_keys = true});  // of two files for one tensor either may be the right one
  if (root.is_discarded()) fail("it {}. It is probably damaged or truncated: copy or download it again.", problem);
  const bool inside = root.is_object() && root.contains("weight_map");
  const auto& map = inside ? root["weight_map"] : root;
  const bool plain = map.is_object() && !map.empty() &&
                     std::all_of(map.begin(), map.end(), [](const auto& value) { return value.is_string(); });
  if (!map.is_object() || (!inside && !plain))
    fail(
        "it has no object \"weight_map\" from tensor names to file names, and is no such object itself. Is it the "
        "index of another format?");
  std::map<std::string, std::string> files;
  std::set<std::string> checked;
  for (const auto& [name, value] : map.items()) {
    if (!value.is_string()) fail("tensor '{}' maps to {}, expected a file name.", name, show_json(value));
    const auto& file_name = value.get_ref<const std::string&>();
    if (checked.insert(file_name).second)
      file_inside(fmt::format("checkpoint index '{}': tensor '{}'", path.string(), name), path.parent_path(),
                  file_name);
    files.emplace(name, file_name);
  }
  return files;
}

bool is_index_name(const fs::path& path) {
  const std::string name = path.filename().string();
  return name == "index.json" || name.ends_with(".index.json");
}

}  // namespace accelerate::formats
