#include <cstdio>

#include "../command.hpp"
#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"

namespace {

int run(const cli::Arguments& arguments) {
  const std::filesystem::path file = arguments.text("config_file");
  std::filesystem::path output = arguments.text("output_file");
  const bool overwrite = arguments.on("overwrite");
  std::error_code ignored;
  if (!overwrite && output.empty())
    throw accelerate::ConfigError("name the new file with --output_file, or let " + file.string() +
                                  " be replaced with --overwrite");
  if (!overwrite && std::filesystem::exists(output, ignored))
    throw accelerate::ConfigError(
        output.string() + " is there already. Name another --output_file, or let it be replaced with --overwrite");
  if (output.empty()) output = file;
  for (const auto& note : accelerate::convert_config_to_fsdp2(file, output))
    std::fprintf(stderr, "accelerate to-fsdp2: %s\n", note.c_str());
  std::printf("Written to %s\n", output.c_str());
  return 0;
}

const cli::Registered kRegistered("to-fsdp2", run);

}  // namespace
