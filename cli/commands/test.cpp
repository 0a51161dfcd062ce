#include <cstdio>

#include "../command.hpp"
#include "accelerate/config.hpp"
#include "accelerate/launch.hpp"

namespace {

int run(const cli::Arguments& arguments) {
  accelerate::LaunchOptions options;
  options.settings = arguments.given;
  options.command = {cli::program_folder() + "/accelerate-self-test"};
  options.no_python = true;
  options.config_file = arguments.text("config_file");
  std::error_code ignored;
  if (const auto file = accelerate::default_config_file();
      options.config_file.empty() && !arguments.on("cpu") && std::filesystem::is_regular_file(file, ignored))
    options.config_file = file;
  if (options.config_file.empty() && arguments.text("num_processes").empty() && accelerate::count_accelerators() < 2)
    options.num_processes = 2;  // one process alone would test little
  const int status = accelerate::launch(options);
  if (status == 0) std::printf("All is well: this machine is ready to train.\n");
  return status;
}

const cli::Registered kRegistered("test", run);

}  // namespace
