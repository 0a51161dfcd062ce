#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "accelerate/adapters.hpp"

namespace accelerate::detail {

/// @throws ConfigError for numbers out of range
void check(const LoraConfig& config);
/// modules_to_save, and the heads that PEFT adds to them.
std::vector<std::string> saved_modules(const LoraConfig& config);
/// The module is one of these or in one of them.
bool is_saved(const std::vector<std::string>& modules, std::string_view path);
/// The target (`name`, or a name that ends with it) is in the list.
bool is_listed(const std::vector<std::string>& modules, const std::string& path);
/// The values for one module.
int64_t rank_of(const LoraConfig& config, const std::string& path);
double alpha_of(const LoraConfig& config, const std::string& path);

/// The text of adapter_config.json. @param transposed  some weight is [inputs, outputs]
std::string to_json(const LoraConfig& config, bool transposed);
struct LoadedConfig {
  LoraConfig config;
  bool whole_names = false;  ///< targets are chosen in a way that we don't write: by a regular expression, by layers
  /// layers_to_transform, if it chooses; the lists of modules that it counts in, or none for the first number of a
  /// path; and target_modules, of which whole names are meant whatever their layer is.
  std::optional<std::vector<int64_t>> layers;
  std::vector<std::string> layer_lists, named;
  /// The module is of another layer, or of none.
  bool leaves_out(const std::string& path) const;
};
/// @throws CheckpointError
LoadedConfig read_config(const std::filesystem::path& file);

}  // namespace accelerate::detail
