#include "accelerate/launch.hpp"

#include "../command.hpp"
#include "accelerate/config.hpp"

namespace {

int run(const cli::Arguments& arguments) {
  accelerate::LaunchOptions options;
  options.settings = arguments.given;
  options.command = arguments.positional;
  options.config_file = arguments.text("config_file");
  std::error_code ignored;
  if (const auto file = accelerate::default_config_file();
      options.config_file.empty() && !arguments.on("cpu") && std::filesystem::is_regular_file(file, ignored))
    options.config_file = file;
  return accelerate::launch(options);
}

const cli::Registered kRegistered("launch", run);

}  // namespace
