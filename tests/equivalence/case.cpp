#include "case.hpp"

#include <fstream>
#include <sstream>
#include <stdexcept>

#include "layouts.hpp"

namespace equivalence {
namespace {

/// In the order in which files have them.
const std::vector<std::pair<std::string, std::string>> kSettings = {
    {"seed", "1"},           {"model", "mlp"},        {"dtype", "f64"},     {"layout", "one"}, {"ranks", "1"},
    {"transport", "memory"}, {"precision", "no"},     {"optimizer", "sgd"}, {"rate", "0.1"},   {"accumulation", "1"},
    {"withheld", "0"},       {"prepare", "together"}, {"recompute", "0"},   {"ahead", "0"}};

[[noreturn]] void fail(const std::string& line, const std::string& why) {
  throw std::runtime_error("case: " + why + " in the line '" + line + "'");
}

}  // namespace

std::string Operation::word(const std::string& name, const std::string& otherwise) const {
  const auto found = values.find(name);
  return found == values.end() ? otherwise : found->second;
}
double Operation::number(const std::string& name, double otherwise) const {
  const auto found = values.find(name);
  return found == values.end() ? otherwise : std::stod(found->second);
}
int64_t Operation::integer(const std::string& name, int64_t otherwise) const {
  const auto found = values.find(name);
  return found == values.end() ? otherwise : std::stoll(found->second);
}

Case simplest() {
  Case what;
  what.settings.insert(kSettings.begin(), kSettings.end());
  return what;
}

Case parse(const std::string& text) {
  Case what = simplest();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    Operation operation;
    if (!(words >> operation.verb)) continue;
    if (const auto setting = what.settings.find(operation.verb); setting != what.settings.end()) {
      if (!(words >> setting->second)) fail(line, "a setting without a value");
      continue;
    }
    for (std::string word; words >> word;) {
      const auto equals = word.find('=');
      if (equals == std::string::npos) fail(line, "expected name=value");
      operation.values[word.substr(0, equals)] = word.substr(equals + 1);
    }
    what.program.push_back(operation);
  }
  return what;
}

Case read(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error("case: can't read " + file);
  std::ostringstream text;
  text << in.rdbuf();
  return parse(text.str());
}

std::string to_text(const Case& what) {
  std::string text;
  for (const auto& [name, simplest] : kSettings) text += name + " " + what[name] + "\n";
  for (const auto& operation : what.program) {
    text += operation.verb;
    for (const auto& [name, value] : operation.values) text += " " + name + "=" + value;
    text += "\n";
  }
  return text;
}

const std::vector<std::pair<std::string, std::vector<std::string>>>& simpler_settings() {
  static const std::vector<std::pair<std::string, std::vector<std::string>>> all = {
      {"ranks", {"1", "2", "3", "4"}},
      {"model", {"mlp"}},
      {"optimizer", {"sgd"}},
      {"precision", {"no"}},
      {"dtype", {"f64", "f32"}},
      {"transport", {"memory", "sockets"}},
      {"layout", {"one", "ddp", "fsdp2"}},
      {"accumulation", {"1", "2"}},
      {"withheld", {"0"}},
      {"prepare", {"together"}},
      {"recompute", {"0"}},
      {"ahead", {"0"}},
      {"rate", {"0.1"}},
      {"seed", {"1"}}};
  return all;
}

Case with_plain_sgd(Case what) {
  if (layout_named(what["layout"]).optimizer.empty()) what.settings["optimizer"] = "sgd";
  what.settings["rate"] = "0.47";  // no power of two: what was stepped on in fp32 could fit 16 bits
  std::erase_if(what.program,
                [](const Operation& operation) { return operation.verb.find("clip") != std::string::npos; });
  return what;
}

}  // namespace equivalence
