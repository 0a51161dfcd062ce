#include "accelerate/launch.hpp"

#include "command.hpp"

namespace {

int run_launch(const cli::Arguments& arguments) {
  accelerate::LaunchOptions options;
  options.settings = arguments.given;
  options.command = arguments.positional;
  options.config_file = cli::launch_config_file(arguments);
  return accelerate::launch(options);
}

const cli::Registered kLaunchCommand("launch", run_launch);

}  // namespace
