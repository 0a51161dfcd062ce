#include <cstdio>

#include "../command.hpp"
#include "accelerate/config.hpp"

namespace {

int run(const cli::Arguments& arguments) {
  std::filesystem::path file = arguments.text("config_file");
  if (file.empty()) file = accelerate::default_config_file();
  accelerate::update_config(file);
  std::printf("The configuration in %s is up to date\n", file.c_str());
  return 0;
}

const cli::Registered kRegistered("config update", run);

}  // namespace
