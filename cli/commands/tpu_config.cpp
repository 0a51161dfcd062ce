#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <sstream>

#include "accelerate/config.hpp"
#include "command.hpp"
#include "input/read_file.hpp"

namespace {

std::vector<std::string> lines_of(const std::string& file) {
  std::string text;
  if (const auto problem = accelerate::read_file(file, accelerate::kMostSettingsBytes, text); !problem.empty())
    accelerate::raise<accelerate::ConfigError>("the file of commands {} can't be read: {}", file, problem);
  if (text.find('\0') != std::string::npos)
    accelerate::raise<accelerate::ConfigError>(
        "the file of commands {} holds a NUL byte, where the shell would stop reading: it is no text", file);
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string what_to_install(const std::string& version) {
  if (version == "latest") return "accelerate -U";
  if (version == "dev") return "git+https://github.com/huggingface/accelerate.git";
  return "accelerate==" + version;
}

int run_tpu_config(const cli::Arguments& arguments) {
  accelerate::TpuConfig config;
  std::error_code ignored;
  if (const std::string file = arguments.text("config_file", accelerate::default_config_file());
      !arguments.text("config_file").empty() || std::filesystem::is_regular_file(file, ignored))
    config = accelerate::tpu_config(file);
  const std::string name = arguments.text("tpu_name", config.name), zone = arguments.text("tpu_zone", config.zone);
  auto commands = arguments.all("command");
  // Commands on the command line replace the config file's altogether; of two on a side, the file of commands wins.
  const std::string command_file = arguments.text("command_file", commands.empty() ? config.command_file : "");
  if (!command_file.empty()) commands = lines_of(command_file);
  else if (commands.empty()) commands = config.commands;
  if (commands.empty()) throw accelerate::ConfigError("nothing to run was given: name a --command or a --command_file");
  if (name.empty() || zone.empty())
    accelerate::raise<accelerate::ConfigError>(
        "the TPU pod's {} is not known: give --tpu_name and --tpu_zone, or a config file with them",
        name.empty() ? "name" : "zone");

  std::string script = "cd /usr/share";
  if (arguments.on("install_accelerate"))
    script += "; pip install " + what_to_install(arguments.text("accelerate_version", "latest"));
  for (const auto& command : commands) script += "; " + command;
  std::vector<std::string> words{"gcloud"};
  if (arguments.on("use_alpha")) words.push_back("alpha");
  for (const std::string& word :
       {std::string("compute"), std::string("tpus"), std::string("tpu-vm"), std::string("ssh"), name,
        std::string("--zone"), zone, std::string("--command"), script, std::string("--worker"), std::string("all")})
    words.push_back(word);
  if (arguments.on("debug")) {
    std::printf("Running");
    for (const auto& word : words) std::printf(" %s", word.c_str());
    std::printf("\n");
    return 0;
  }
  std::vector<char*> argv;
  for (const auto& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  accelerate::raise<accelerate::LaunchError>(
      "gcloud can't be started: {}. Install Google Cloud's command line tools, which reach the pod's workers",
      std::strerror(errno));
}

const cli::Registered kTpuConfigCommand("tpu-config", run_tpu_config);

}  // namespace
