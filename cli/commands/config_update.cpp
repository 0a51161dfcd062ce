#include <cstdio>

#include "accelerate/config.hpp"
#include "command.hpp"

namespace {

int run_config_update(const cli::Arguments& arguments) {
  std::filesystem::path file = arguments.text("config_file");
  if (file.empty()) file = accelerate::default_config_file();
  accelerate::update_config(file);
  std::printf("The configuration in %s is up to date\n", file.c_str());
  return 0;
}

const cli::Registered kConfigUpdateCommand("config update", run_config_update);

}  // namespace
