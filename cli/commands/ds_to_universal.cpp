#include <cstdio>
#include <string>
#include <vector>

#include "command.hpp"
#include "utils/raise.hpp"

namespace {

using accelerate::ConfigError;
using accelerate::raise;

/// DeepSpeed's tool has options for both folders, which are its only way of giving them.
std::string folder(const cli::Arguments& arguments, size_t position, const char* option) {
  const bool given = arguments.positional.size() > position;
  const auto text = arguments.text(option);
  if (given && !text.empty())
    raise<ConfigError>("found '{}' and --{} '{}', expected the folder once", arguments.positional[position], option,
                       text);
  const auto result = given ? arguments.positional[position] : text;
  if (result.empty())
    raise<ConfigError>(
        "the {} is missing. Usage: accelerate ds-to-universal [options] INPUT_FOLDER OUTPUT_FOLDER, or --input_folder "
        "and --output_folder",
        position == 0 ? "input folder" : "output folder");
  return result;
}

void remark(const cli::Arguments& arguments, const char* option, const char* why) {
  for (const auto& [name, text] : arguments.given)
    if (name == option) return void(std::fprintf(stderr, "accelerate ds-to-universal: --%s: %s\n", option, why));
}

int run_ds_to_universal(const cli::Arguments& arguments) {
  std::vector<std::string> words{folder(arguments, 0, "input_folder"), folder(arguments, 1, "output_folder")};
  constexpr const char* kOnePass = "there is one pass, which reads each tensor's pieces and writes it whole";
  remark(arguments, "num_extract_workers", kOnePass);
  remark(arguments, "num_merge_workers", kOnePass);
  remark(arguments, "keep_temp_folder", "there is no folder of intermediate files");
  remark(arguments, "inject_missing_state", "no state need be injected: without patterns each tensor is as it is");
  if (arguments.on("no_strict")) words.insert(words.end(), {"--no_strict", "true"});
  if (const auto tag = arguments.text("tag"); !tag.empty()) words.insert(words.end(), {"--tag", tag});
  cli::become("accelerate-ds-to-universal", words);
}

const cli::Registered kDsToUniversalCommand("ds-to-universal", run_ds_to_universal);

}  // namespace
