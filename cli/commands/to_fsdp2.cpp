#include <cstdio>

#include "accelerate/config.hpp"
#include "command.hpp"
#include "utils/raise.hpp"

namespace {

int run_to_fsdp2(const cli::Arguments& arguments) {
  const std::filesystem::path file = arguments.text("config_file");
  std::filesystem::path output = arguments.text("output_file");
  const bool overwrite = arguments.on("overwrite");
  std::error_code ignored;
  if (!overwrite && output.empty())
    accelerate::raise<accelerate::ConfigError>(
        "name the new file with --output_file, or let {} be replaced with --overwrite", file.string());
  if (!overwrite && std::filesystem::exists(output, ignored))
    accelerate::raise<accelerate::ConfigError>(
        "{} is there already. Name another --output_file, or let it be replaced with --overwrite", output.string());
  if (output.empty()) output = file;
  for (const auto& note : accelerate::convert_config_to_fsdp2(file, output))
    std::fprintf(stderr, "accelerate to-fsdp2: %s\n", note.c_str());
  std::printf("Written to %s\n", output.c_str());
  return 0;
}

const cli::Registered kToFsdp2Command("to-fsdp2", run_to_fsdp2);

}  // namespace
