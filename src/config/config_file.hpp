#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/value.hpp"

/// The files that `accelerate config` writes, in the form that Hugging Face Accelerate reads and writes.
namespace accelerate::config {

using Environment = std::map<std::string, std::string>;

/// $HF_HOME/accelerate/default_config.yaml, else below $XDG_CACHE_HOME/huggingface or ~/.cache/huggingface; .json if
/// only that is there.
std::filesystem::path default_config_file(const Environment& environment);

/// A file's settings: every key that such a file can have, with the default or null for what it leaves out. Old
/// spellings are understood.
/// @throws ConfigError when it can't be read, is not YAML (or JSON, by its name), lacks distributed_type, or has keys
/// that don't exist at the top. Those of sections stay, as files of other programs and versions have them.
Value load_config(const std::filesystem::path& file);

/// As load_config, for text that has been parsed already.
Value complete_config(Value given, const std::string& file);

bool is_sagemaker(const Value& config);

/// A config as it is written: keys without a value and empty sections are left out.
Value without_empty(const Value& config);

/// As save_config, with all that is there: keys without a value and empty sections too.
void write_config(const Value& config, const std::filesystem::path& file);

/// Writes JSON if the name ends in .json, else YAML; a file appears complete or not at all. Creates the folder.
void save_config(const Value& config, const std::filesystem::path& file);

/// The config for a machine with this many accelerators. @throws ConfigError for an unknown precision.
Value basic_config(const std::string& mixed_precision, int64_t accelerators);

/// The setting that a key of a section means: "backend" in fp8_config is fp8_backend.
std::string setting_name(const std::string& section, const std::string& key);

/// The row of the table that a key of a section means; null when none does.
const Option* option_of(const std::string& section, const std::string& key);
/// The key that a meaningless key of a section was probably meant to be.
std::optional<std::string> nearest_key(const std::string& section, const std::string& key);

/// Reads a file into JSON without looking at its keys.
Value read_config(const std::filesystem::path& file);

/// FSDP version 1 to 2. Settings that can't be carried over are named in `notes`, a line each.
Value to_fsdp2(Value config, std::vector<std::string>& notes);

}  // namespace accelerate::config
