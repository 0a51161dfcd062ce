#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The name in `valid` that a mistyped `given` most likely meant, for messages of the kind "did you mean …?".
///
/// Compares without regard to case and to '-' against '_', by the least number of inserted, removed, changed or swapped
/// letters.
/// @return nothing when no name is near enough (more than a third of the letters differ).
ACCELERATE_API std::optional<std::string> nearest_name(std::string_view given, const std::vector<std::string>& valid);

/// The config file that is read when none is named: $HF_HOME/accelerate/default_config.yaml, else below
/// $XDG_CACHE_HOME/huggingface or ~/.cache/huggingface. It need not exist.
ACCELERATE_API std::filesystem::path default_config_file();

/// Writes a config file for this machine: one process per GPU, or one on the CPU. JSON if the name ends in .json, else
/// YAML; folders are created.
/// @param mixed_precision  no, fp16, bf16 or fp8, in any case
/// @param file             empty: default_config_file()
/// @return false, and nothing written, when the file exists.
/// @throws ConfigError for another precision, or when the file can't be written.
ACCELERATE_API bool write_basic_config(const std::string& mixed_precision = "no", std::filesystem::path file = {});

/// Reads a config file, also one of an older version, and writes it back with every key that has a value.
/// @throws ConfigError when it can't be read or written, or has keys that don't exist.
ACCELERATE_API void update_config(const std::filesystem::path& file);

/// Reads settings for FSDP version 1 and writes them for version 2; other settings stay as they are.
/// @return what could not be carried over, a line each.
/// @throws ConfigError as update_config.
ACCELERATE_API std::vector<std::string> convert_config_to_fsdp2(const std::filesystem::path& file,
                                                                const std::filesystem::path& output);

/// The settings of a config file that have a value, in the file's order: names and values as text. A nested key is
/// "section.key".
/// @throws ConfigError as update_config.
ACCELERATE_API std::vector<std::pair<std::string, std::string>> config_values(const std::filesystem::path& file);

/// A config file's settings as a JSON text. @throws ConfigError as update_config.
ACCELERATE_API std::string config_as_json(const std::filesystem::path& file);

/// Two settings of a pod that `accelerate launch` has no flags for, and what to run there.
struct TpuConfig {
  std::string name, zone, command_file;
  std::vector<std::string> commands;
};
ACCELERATE_API TpuConfig tpu_config(const std::filesystem::path& file);

/// Puts the questions of `accelerate config` to the user.
class ACCELERATE_API Dialog {
 public:
  /// Thrown by a question when the user wants to go back to the one before.
  struct Back {};

  virtual ~Dialog() = default;
  /// Lets the user choose. @return an index into `choices`
  virtual size_t choose(const std::string& question, const std::vector<std::string>& choices, size_t usual) = 0;
  /// @return what was typed, without blanks at the ends; `usual` if nothing was.
  virtual std::string ask(const std::string& question, const std::string& usual) = 0;
  virtual void say(const std::string& line) = 0;
};

/// Asks what a config file should say and writes it. Every answer is checked when it is given, and asked again with the
/// reason why not.
/// @return the text of the file.
/// @throws ConfigError when the file can't be written, and whatever the dialog throws.
ACCELERATE_API std::string ask_config(Dialog& dialog, const std::filesystem::path& file);

/// GPUs that this process may use, counted without a driver.
ACCELERATE_API int64_t count_accelerators();

}  // namespace accelerate
