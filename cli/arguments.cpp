#include "arguments.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <string_view>
#include <utility>

#include "accelerate/config.hpp"
#include "utils/raise.hpp"

namespace cli {
namespace {

using accelerate::ConfigError;
using accelerate::raise;
using accelerate::config::CommandTable;
using accelerate::config::Kind;
using accelerate::config::Option;

std::vector<const Option*> options_of(const CommandTable& table, bool positional) {
  std::vector<const Option*> result;
  for (const auto& group : table.groups)
    for (const auto& option : group.options)
      if (option.positional() == positional) result.push_back(&option);
  return result;
}

class ArgumentsReader {
 public:
  ArgumentsReader(const CommandTable& table, const std::vector<std::string>& words) : table_(table), words_(words) {}

  std::optional<Arguments> read() {
    const auto positional = options_of(table_, true);
    const bool takes_program = !positional.empty() && positional.back()->kind == Kind::words;
    for (; next_ < words_.size(); ++next_) {
      const std::string& word = words_[next_];
      if (word == "-h" || word == "--help") return std::fputs(help(table_).c_str(), stdout), std::nullopt;
      if (word == "--") {
        result_.positional.insert(result_.positional.end(), words_.begin() + static_cast<std::ptrdiff_t>(next_) + 1,
                                  words_.end());
        break;
      }
      if (word.size() > 1 && word.front() == '-') {
        take_option(word);
      } else if (takes_program) {
        result_.positional.assign(words_.begin() + static_cast<std::ptrdiff_t>(next_), words_.end());
        break;
      } else {
        result_.positional.push_back(word);
      }
    }
    if (!takes_program && result_.positional.size() > positional.size())
      raise<ConfigError>("there is nothing that '{}' could mean. See `accelerate {} --help`",
                         result_.positional[positional.size()], table_.name);
    for (size_t i = result_.positional.size(); i < positional.size() && !takes_program; ++i)
      if (positional[i]->required) raise<ConfigError>("{} is missing. Usage: {}", positional[i]->value, table_.usage);
    for (size_t i = 0; i < std::min(positional.size(), result_.positional.size()); ++i)
      take_choice(*positional[i], result_.positional[i], positional[i]->value);
    for (const auto* option : options_of(table_, false))
      for (auto& [name, text] : result_.given)
        if (name == option->name) take_choice(*option, text, option->spellings().front());
    for (const auto* option : options_of(table_, false))
      if (option->required && result_.text(option->name).empty())
        raise<ConfigError>("{} must be given. Usage: {}", option->spellings().front(), table_.usage);
    return std::move(result_);
  }

 private:
  /// `text` may be a back end of fp8 in capitals, as its enumeration and files have it. All else is as the reference
  /// takes it, to the letter.
  static void take_choice(const Option& option, std::string& text, const std::string& name) {
    const auto choices = option.choice_list();
    if (choices.empty() || std::find(choices.begin(), choices.end(), text) != choices.end()) return;
    for (const auto& choice : choices)
      if (option.name == std::string_view("fp8_backend") &&
          std::equal(choice.begin(), choice.end(), text.begin(), text.end(),
                     [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); }))
        return void(text = choice);
    const auto nearest = accelerate::nearest_name(text, choices);
    raise<ConfigError>("{} is '{}', expected one of: {}{}", name, text, fmt::join(choices, ", "),
                       nearest ? fmt::format(". Did you mean '{}'?", *nearest) : "");
  }

  const Option* find(const std::string& spelling) const {
    for (const auto* option : options_of(table_, false)) {
      const auto spellings = option->spellings();
      if (std::find(spellings.begin(), spellings.end(), spelling) != spellings.end()) return option;
    }
    return nullptr;
  }

  void take_option(const std::string& word) {
    const size_t equals = word.find('=');
    std::string spelling = word.substr(0, equals), value;
    bool attached = equals != std::string::npos;
    if (attached) value = word.substr(equals + 1);
    const Option* option = find(spelling);
    if (!option && word[1] != '-' && word.size() > 2) {  // -t3
      spelling = word.substr(0, 2);
      option = find(spelling);
      if (option && option->takes_value()) value = word.substr(2), attached = true;
      else option = nullptr;
    }
    if (!option) unknown(word.substr(0, equals));
    if (!option->takes_value()) {
      if (attached) raise<ConfigError>("{} takes no value, and '{}' was given", spelling, value);
      result_.given.emplace_back(option->name, option->kind == Kind::flag ? "true" : "false");
      return;
    }
    if (option->kind == Kind::words && !attached && next_ + 1 < words_.size() && !words_[next_ + 1].starts_with("--")) {
      while (next_ + 1 < words_.size() && !words_[next_ + 1].starts_with("--"))
        result_.given.emplace_back(option->name, words_[++next_]);
      return;
    }
    if (!attached && option->bare) return void(result_.given.emplace_back(option->name, option->bare));
    if (!attached) {
      const bool negative_number = next_ + 1 < words_.size() && words_[next_ + 1].size() > 1 &&
                                   words_[next_ + 1][0] == '-' &&
                                   std::isdigit(static_cast<unsigned char>(words_[next_ + 1][1]));
      if (next_ + 1 == words_.size() ||
          (words_[next_ + 1].starts_with("-") && words_[next_ + 1].size() > 1 && !negative_number))
        raise<ConfigError>("{} needs a value: {}", spelling,
                           option->value     ? option->value
                           : option->choices ? option->choices
                                             : "VALUE");
      value = words_[++next_];
    }
    result_.given.emplace_back(option->name, value);
  }

  [[noreturn]] void unknown(const std::string& spelling) const {
    std::vector<std::string> names{"--help"};
    for (const auto* option : options_of(table_, false))
      for (const auto& known : option->spellings()) names.push_back(known);
    // The names of torchrun and others are no slips of a letter.
    constexpr std::pair<std::string_view, const char*> kCalledElsewhere[] = {
        {"nproc_per_node", "--num_processes"}, {"nproc", "--num_processes"},          {"num_proc", "--num_processes"},
        {"num_procs", "--num_processes"},      {"num_gpus", "--num_processes"},       {"np", "--num_processes"},
        {"nnodes", "--num_machines"},          {"num_nodes", "--num_machines"},       {"node_rank", "--machine_rank"},
        {"master_addr", "--main_process_ip"},  {"master_port", "--main_process_port"}};
    std::string plain = spelling.substr(std::min(spelling.find_first_not_of('-'), spelling.size()));
    std::replace(plain.begin(), plain.end(), '-', '_');
    auto nearest = accelerate::nearest_name(spelling, names);
    for (const auto& [theirs, ours] : kCalledElsewhere)
      if (plain == theirs && find(ours)) nearest = ours;
    raise<ConfigError>(
        "there is no option '{}'. {}", spelling,
        nearest ? fmt::format("Did you mean '{}'?", *nearest) : fmt::format("See `accelerate {} --help`", table_.name));
  }

  const CommandTable& table_;
  const std::vector<std::string>& words_;
  size_t next_ = 0;
  Arguments result_;
};

/// `text` in lines of at most `width` letters, each after the first indented.
std::string wrapped(const std::string& text, size_t indent, size_t width) {
  std::string result;
  size_t column = 0;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = std::min(text.find(' ', begin), text.size());
    if (column > 0 && column + end - begin + 1 > width) result += "\n" + std::string(indent, ' '), column = 0;
    else if (column > 0) result += ' ', ++column;
    result += text.substr(begin, end - begin);
    column += end - begin;
    begin = end + 1;
  }
  return result;
}

}  // namespace

std::string Arguments::text(const std::string& name, const std::string& otherwise) const {
  std::string result = otherwise;
  for (const auto& [given_name, value] : given)
    if (given_name == name) result = value;
  return result;
}

std::vector<std::string> Arguments::all(const std::string& name) const {
  std::vector<std::string> result;
  for (const auto& [given_name, value] : given)
    if (given_name == name) result.push_back(value);
  return result;
}

std::optional<Arguments> read(const CommandTable& table, const std::vector<std::string>& arguments) {
  return ArgumentsReader(table, arguments).read();
}

std::string help(const CommandTable& table) {
  constexpr size_t kColumn = 40, kWidth = 80;
  std::string text = std::string(table.summary) + ".\n\nUsage: " + table.usage + "\n";
  const auto row = [&](const std::string& left, const std::string& right) {
    text +=
        "  " + left +
        (left.size() + 3 > kColumn ? "\n" + std::string(kColumn, ' ') : std::string(kColumn - left.size() - 2, ' ')) +
        wrapped(right, kColumn, kWidth) + "\n";
  };
  for (const auto& group : table.groups) {
    std::vector<std::pair<std::string, std::string>> rows;
    for (const auto& option : group.options) {
      const auto spellings = option.spellings();
      if (spellings.empty()) continue;
      std::string left, right = option.help;
      for (const auto& spelling : spellings)
        if (spelling.find('-', 2) == std::string::npos || option.positional())
          left += (left.empty() ? "" : ", ") + spelling;
      if (option.positional()) left = option.value;
      else if (option.bare) left += fmt::format("[={}]", option.value);
      else if (option.takes_value())
        left += " " + std::string(option.value                                                     ? option.value
                                  : option.choices && std::string_view(option.choices).size() < 30 ? option.choices
                                                                                                   : "NAME");
      if (option.choices && std::string_view(option.choices).size() >= 30) right += ": " + std::string(option.choices);
      if (option.has_default() && option.takes_value() && option.kind != Kind::boolean)
        right += " (default " + option.default_text() + ")";
      rows.emplace_back(left, right);
    }
    if (rows.empty()) continue;
    text += "\n" + (*group.title ? std::string(group.title) : "Options") + ":\n";
    if (!*group.title) row("-h, --help", "Show this text");
    for (const auto& [left, right] : rows) row(left, right);
  }
  return text + "\nOptions may be written with '-' for '_'.\n";
}

}  // namespace cli
