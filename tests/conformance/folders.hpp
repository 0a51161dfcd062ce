#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "ranks.hpp"
#include "runner.hpp"

namespace conformance {

/// An empty folder of this name in the scratch folder, below one for the runner.
inline std::filesystem::path fresh_folder(const std::string& runner, const std::string& name) {
  const std::filesystem::path folder = std::filesystem::path(support::scratch_dir()) / runner / name;
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  return folder;
}

/// Names of what is directly in a folder, sorted.
inline json files_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace conformance
