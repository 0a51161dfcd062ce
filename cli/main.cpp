#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>

#include "accelerate/config.hpp"
#include "accelerate/utils/version.hpp"
#include "command.hpp"
#include "utils/raise.hpp"

namespace cli {
namespace {

using accelerate::config::command_tables;

std::map<std::string, Run>& registry() {
  static std::map<std::string, Run> all;
  return all;
}

void print_help(std::FILE* out) {
  std::fprintf(
      out,
      "Train on one process or many, with the same program.\n\nUsage: accelerate COMMAND [options]\n\nCommands:\n");
  for (const auto& table : command_tables()) std::fprintf(out, "  %-18s %s\n", table.name, table.summary);
  std::fprintf(out, "\nOptions:\n  %-18s %s\n  %-18s %s\n\n`accelerate COMMAND --help` says more.\n", "-h, --help",
               "Show this text", "--version", "Show the version");
}

int unknown(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& table : command_tables())
    if (!std::strchr(table.name, ' ')) names.emplace_back(table.name);
  const auto nearest = accelerate::nearest_name(name, names);
  std::fprintf(stderr, "accelerate: there is no command '%s'.%s The commands are:", name.c_str(),
               nearest ? (" Did you mean '" + *nearest + "'?").c_str() : "");
  for (const auto& known : names) std::fprintf(stderr, " %s", known.c_str());
  std::fprintf(stderr, "\n");
  return 64;
}

int run(std::vector<std::string> arguments) {
  if (arguments.empty()) return print_help(stderr), 64;
  std::string name = arguments.front();
  if (name == "-h" || name == "--help" || name == "help") return print_help(stdout), 0;
  if (name == "--version") return std::printf("accelerate %s\n", ACCELERATE_VERSION), 0;
  arguments.erase(arguments.begin());
  if (!arguments.empty() && registry().contains(name + " " + arguments.front())) {
    name += " " + arguments.front();
    arguments.erase(arguments.begin());
  }
  if (!registry().contains(name)) return unknown(name);
  try {
    const auto given = read(table_of(name), arguments);
    return given ? registry().at(name)(*given) : 0;
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate %s: %s\n", name.c_str(), error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate %s: unexpected error: %s\n", name.c_str(), error.what());
    return 70;
  }
}

}  // namespace

Registered::Registered(const std::string& name, Run run) { registry()[name] = run; }

const accelerate::config::CommandTable& table_of(const std::string& name) {
  for (const auto& table : command_tables())
    if (name == table.name) return table;
  accelerate::raise<accelerate::InternalError>("the command {} has no table", name);
}

std::string program_folder() {
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path();
}

std::filesystem::path launch_config_file(const Arguments& arguments) {
  const std::filesystem::path named = arguments.text("config_file");
  if (!named.empty() || arguments.on("cpu")) return named;
  std::error_code ignored;
  const auto usual = accelerate::default_config_file();
  return std::filesystem::is_regular_file(usual, ignored) ? usual : std::filesystem::path();
}

void become(const std::string& program, const std::vector<std::string>& arguments) {
  const std::string path = program_folder() + "/" + program;
  std::vector<char*> argv{const_cast<char*>(path.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::fflush(nullptr);
  ::execv(path.c_str(), argv.data());
  accelerate::raise<accelerate::NotBuiltError>(
      "the program {}, which does this, can't be started: {}. It is built and installed together with this one; was "
      "only this one copied?",
      path, std::strerror(errno));
}

}  // namespace cli

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  // accelerate-launch is `accelerate launch`, as the reference's scripts of these names are.
  const std::string called = std::filesystem::path(argc > 0 ? argv[0] : "").filename();
  if (called.starts_with("accelerate-")) arguments.insert(arguments.begin(), called.substr(std::strlen("accelerate-")));
  return cli::run(std::move(arguments));
}
