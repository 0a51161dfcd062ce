#include <cstdio>

#include "accelerate/config.hpp"
#include "command.hpp"

namespace {

int run_config_default(const cli::Arguments& arguments) {
  std::filesystem::path file = arguments.text("save_location");
  if (file.empty()) file = accelerate::default_config_file();
  const std::string precision = arguments.text("mixed_precision", "no");
  if (!accelerate::write_basic_config(precision, file)) {
    // No error, as in the reference: scripts write a config where there may be one.
    std::printf("%s is there already and stays as it is. Remove it first, or name another with --config_file\n",
                file.c_str());
    return 0;
  }
  std::printf("The configuration is in %s\n", file.c_str());
  return 0;
}

const cli::Registered kConfigDefaultCommand("config default", run_config_default);

}  // namespace
