#include "options.hpp"

#include <algorithm>
#include <iostream>

#include "accelerate/config.hpp"
#include "accelerate/error.hpp"

namespace cli {
namespace {

class Layout : public CLI::Formatter {
 public:
  explicit Layout(std::string usage) : usage_(std::move(usage)) { column_width(38); }
  std::string make_usage(const CLI::App*, std::string) const override { return "\n" + usage_ + "\n"; }
  /// Shows one spelling of each option.
  std::string make_option_name(const CLI::Option* option, bool) const override {
    std::string names;
    for (const auto& name : option->get_snames()) names += "-" + name + ", ";
    return names + "--" + option->get_lnames().front();
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_type_size() == 0 || option->get_type_name().empty() ? "" : " " + option->get_type_name();
  }

 private:
  std::string usage_;
};

}  // namespace

std::string spelled(const std::string& name) {
  std::string dashed = name;
  std::replace(dashed.begin(), dashed.end(), '_', '-');
  return "--" + name + (dashed == name ? "" : ",--" + dashed);
}

Parser::Parser(const std::string& description, const std::string& name, const std::string& usage) : CLI::App(description, name) {
  formatter(std::make_shared<Layout>(usage));
  set_help_flag("-h,--help", "Show this text");
  prefix_command();
}

std::optional<std::vector<std::string>> Parser::read(std::vector<std::string> arguments) {
  std::reverse(arguments.begin(), arguments.end());
  try {
    parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    std::cout << help();
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw accelerate::ConfigError(std::string(error.what()) + ". See `" + get_name() + " --help`");
  }
  std::vector<std::string> rest = remaining();
  if (rest.empty()) return rest;
  if (rest.front() == "--") return rest.erase(rest.begin()), rest;
  if (rest.front().size() < 2 || rest.front().front() != '-') return rest;
  const std::string given = rest.front().substr(0, rest.front().find('='));
  std::vector<std::string> names;
  for (const auto* option : get_options())
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  const auto nearest = accelerate::nearest_name(given, names);
  throw accelerate::ConfigError("there is no option '" + given + "'" + (nearest ? ". Did you mean '" + *nearest + "'?" : ". See `" + get_name() + " --help`"));
}

}  // namespace cli
