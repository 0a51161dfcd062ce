#include <cstdio>

#include "accelerate/config.hpp"
#include "accelerate/launch.hpp"
#include "command.hpp"

namespace {

int run_test(const cli::Arguments& arguments) {
  accelerate::LaunchOptions options;
  options.settings = arguments.given;
  options.command = {cli::program_folder() + "/accelerate-self-test"};
  options.no_python = true;
  options.config_file = cli::launch_config_file(arguments);
  if (options.config_file.empty() && arguments.text("num_processes").empty() && accelerate::count_accelerators() < 2)
    options.num_processes = 2;  // one process alone would test little
  const int status = accelerate::launch(options);
  if (status == 0) std::printf("All is well: this machine is ready to train.\n");
  return status;
}

const cli::Registered kTestCommand("test", run_test);

}  // namespace
