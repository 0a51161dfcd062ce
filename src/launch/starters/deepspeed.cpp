#include "launch/starters/deepspeed.hpp"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "launch/job/host.hpp"
#include "launch/job/require.hpp"
#include "launch/job/settings.hpp"

namespace accelerate::launcher {

std::vector<std::string> deepspeed_words(const Settings& settings, int64_t port) {
  const std::string launcher = settings.text("deepspeed_multinode_launcher");
  const std::string hostfile = settings.text("deepspeed_hostfile");
  require(
      !hostfile.empty(),
      "with DeepSpeed on several machines --deepspeed_hostfile must be given, a line for each: NAME slots=N. Or give "
      "--deepspeed_multinode_launcher standard and run this command on each");
  std::vector<std::string> words{"deepspeed", "--hostfile", hostfile};
  const auto add = [&](std::initializer_list<std::string> more) { words.insert(words.end(), more); };
  if (launcher == "nossh") add({"--node_rank", settings.text("machine_rank"), "--no_ssh"});
  else add({"--no_local_rank", "--launcher", launcher.empty() ? "pdsh" : launcher});
  if (const auto filter = settings.text("deepspeed_exclusion_filter"); !filter.empty()) add({"--exclude", filter});
  else if (const auto chosen = settings.text("deepspeed_inclusion_filter"); !chosen.empty()) add({"--include", chosen});
  else add({"--num_gpus", std::to_string(settings.num_processes() / settings.num_machines())});
  if (const auto ip = settings.text("main_process_ip"); !ip.empty()) add({"--master_addr", ip});
  add({"--master_port", std::to_string(port)});
  if (settings.on("module")) add({"--module"});
  if (settings.on("no_python")) add({"--no_python"});
  return words;
}

std::vector<std::string> add_to_deepspeed_env(const std::map<std::string, std::string>& variables, const Host& host) {
  const std::string file = host.variable("HOME").value_or(".") + "/.deepspeed_env";
  std::ofstream out(file, std::ios::app);
  std::vector<std::string> left_out;
  for (const auto& [name, value] : variables) {
    if (value.empty()) continue;
    if (value.find_first_of(";\n<> ") != std::string::npos) left_out.push_back(name);
    else out << name << '=' << value << '\n';
  }
  out.close();
  if (!out)
    raise<LaunchError>("{}, from which DeepSpeed takes the variables for other machines, can't be written: {}", file,
                       std::strerror(errno));
  return left_out;
}

}  // namespace accelerate::launcher
