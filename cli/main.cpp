#include <algorithm>
#include <cstdio>
#include <exception>

#include "accelerate/config.hpp"
#include "accelerate/error.hpp"
#include "accelerate/version.hpp"
#include "command.hpp"

namespace cli {
namespace {

std::vector<Command>& registry() {
  static std::vector<Command> all;
  return all;
}

void print_help(std::FILE* out) {
  std::fprintf(out, "Train on one process or many, with the same program.\n\nUsage: accelerate COMMAND [options]\n\nCommands:\n");
  for (const auto& command : commands()) std::fprintf(out, "  %-18s %s\n", command.name.c_str(), command.summary.c_str());
  std::fprintf(out, "\nOptions:\n  %-18s %s\n  %-18s %s\n\n`accelerate COMMAND --help` says more.\n", "-h, --help", "Show this text", "--version", "Show the version");
}

int unknown(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& command : commands()) names.push_back(command.name);
  const auto nearest = accelerate::nearest_name(name, names);
  std::fprintf(stderr, "accelerate: there is no command '%s'.%s The commands are:", name.c_str(), nearest ? (" Did you mean '" + *nearest + "'?").c_str() : "");
  for (const auto& known : names) std::fprintf(stderr, " %s", known.c_str());
  std::fprintf(stderr, "\n");
  return 64;
}

}  // namespace

const std::vector<Command>& commands() {
  std::sort(registry().begin(), registry().end(), [](const Command& a, const Command& b) { return a.name < b.name; });
  return registry();
}

Registered::Registered(Command command) { registry().push_back(std::move(command)); }

}  // namespace cli

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) return cli::print_help(stderr), 64;
  const std::string name = arguments.front();
  if (name == "-h" || name == "--help" || name == "help") return cli::print_help(stdout), 0;
  if (name == "--version") return std::printf("accelerate %s\n", ACCELERATE_VERSION), 0;
  const auto& all = cli::commands();
  const auto command = std::find_if(all.begin(), all.end(), [&](const auto& c) { return c.name == name; });
  if (command == all.end()) return cli::unknown(name);
  arguments.erase(arguments.begin());
  try {
    return command->run(std::move(arguments));
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate %s: %s\n", name.c_str(), error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate %s: unexpected error: %s\n", name.c_str(), error.what());
    return 70;
  }
}
