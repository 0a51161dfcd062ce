#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

#include "command.hpp"

namespace {

using accelerate::config::command_tables;
using accelerate::config::CommandTable;
using accelerate::config::Option;

/// The spelling with underscores alone: offering each option twice helps nobody.
std::vector<std::string> offered(const Option& option) {
  std::vector<std::string> result;
  if (option.positional()) return result;
  for (const auto& spelling : option.spellings())
    if (spelling.find('-', 2) == std::string::npos) result.push_back(spelling);
  return result;
}

template <class Function> void for_each(const CommandTable& table, Function function) {
  for (const auto& group : table.groups)
    for (const auto& option : group.options) function(option);
}

std::string first_words() {
  std::string words;
  for (const auto& table : command_tables())
    if (!std::strchr(table.name, ' ')) words += (words.empty() ? "" : " ") + std::string(table.name);
  return words;
}

std::string quoted(std::string text) {
  for (size_t at = 0; (at = text.find('\'', at)) != std::string::npos; at += 4) text.replace(at, 1, "'\\''");
  return "'" + text + "'";
}

std::string spaced(std::string choices) {
  std::replace(choices.begin(), choices.end(), '|', ' ');
  return choices;
}

void bash() {
  std::printf(
      "# bash completion for accelerate: source it, or save it as "
      "/usr/share/bash-completion/completions/accelerate\n_accelerate() {\n"
      "  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} name=${COMP_WORDS[1]} options\n"
      "  [ \"$name\" = config ] && case ${COMP_WORDS[2]} in default | update) name=\"config ${COMP_WORDS[2]}\" ;; "
      "esac\n"
      "  if [ \"$COMP_CWORD\" = 1 ]; then COMPREPLY=($(compgen -W '%s' -- \"$word\")); return; fi\n  case \"$before\" "
      "in\n",
      first_words().c_str());
  std::map<std::string, std::string> seen;  // one list of choices per spelling
  for (const auto& table : command_tables())
    for_each(table, [&](const Option& option) {
      if (option.choices && !option.bare)
        for (const auto& spelling : offered(option)) seen.emplace(spelling, spaced(option.choices));
    });
  for (const auto& [spelling, choices] : seen)
    std::printf("    %s) COMPREPLY=($(compgen -W '%s' -- \"$word\")); return ;;\n", spelling.c_str(), choices.c_str());
  std::printf(
      "    --*file | --*path | --*dir) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n  esac\n  case \"$name\" "
      "in\n");
  for (const auto& table : command_tables()) {
    std::string options = std::string(table.name) == "config" ? "default update" : "";
    for_each(table, [&](const Option& option) {
      for (const auto& spelling : offered(option)) options += (options.empty() ? "" : " ") + spelling;
      if (option.positional() && option.choices) options += spaced(option.choices);
    });
    std::printf("    '%s') options='%s' ;;\n", table.name, options.c_str());
  }
  std::printf(
      "  esac\n  COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n  [ \"${#COMPREPLY[@]}\" = 0 ] && "
      "COMPREPLY=($(compgen -f -- \"$word\"))\n}\n"
      "complete -o filenames -F _accelerate accelerate\n");
}

void zsh() {
  std::printf(
      "#compdef accelerate\n# zsh completion for accelerate: save it as _accelerate in a folder of "
      "$fpath\n_accelerate() {\n  local -a commands\n  commands=(\n");
  for (const auto& table : command_tables())
    if (!std::strchr(table.name, ' '))
      std::printf("    %s\n", quoted(std::string(table.name) + ":" + table.summary).c_str());
  std::printf(
      "  )\n  if (( CURRENT == 2 )); then _describe command commands; return; fi\n"
      "  local name=$words[2]\n  [[ $name = config && ( $words[3] = default || $words[3] = update ) ]] && "
      "name=\"config $words[3]\"\n  case $name in\n");
  for (const auto& table : command_tables()) {
    std::printf("    %s) _arguments", quoted(table.name).c_str());
    for_each(table, [&](const Option& option) {
      std::string help = option.help;
      for (const char* special : {"[", "]", ":"})
        for (size_t at = 0; (at = help.find(special, at)) != std::string::npos; at += 2) help.insert(at, "\\");
      const std::string after = !option.takes_value() || option.bare
                                    ? ""
                                    : ":" + std::string(option.value ? option.value : "value") + ":" +
                                          (option.choices ? "(" + spaced(option.choices) + ")" : "_files");
      for (const auto& spelling : offered(option))
        std::printf(" \\\n      %s", quoted(spelling + "[" + help + "]" + after).c_str());
    });
    if (std::string(table.name) == "config") std::printf(" \\\n      '1:command:(default update)'");
    std::printf(" \\\n      '*:file:_files' ;;\n");
  }
  std::printf("  esac\n}\n_accelerate \"$@\"\n");
}

void fish() {
  std::printf("# fish completion for accelerate: save it as ~/.config/fish/completions/accelerate.fish\n");
  for (const auto& table : command_tables()) {
    const std::string name = table.name;
    const size_t blank = name.find(' ');
    if (blank == std::string::npos)
      std::printf("complete -c accelerate -n __fish_use_subcommand -a %s -d %s\n", quoted(name).c_str(),
                  quoted(table.summary).c_str());
    else
      std::printf("complete -c accelerate -n '__fish_seen_subcommand_from %s' -a %s -d %s\n",
                  name.substr(0, blank).c_str(), name.substr(blank + 1).c_str(), quoted(table.summary).c_str());
    for_each(table, [&](const Option& option) {
      if (option.positional() || option.spellings().empty()) return;
      std::printf("complete -c accelerate -n '__fish_seen_subcommand_from %s'",
                  name.substr(blank == std::string::npos ? 0 : blank + 1).c_str());
      for (const auto& spelling : offered(option))
        std::printf(spelling.starts_with("--") ? " -l %s" : " -s %s",
                    spelling.substr(spelling.starts_with("--") ? 2 : 1).c_str());
      if (option.choices && !option.bare) std::printf(" -x -a %s", quoted(spaced(option.choices)).c_str());
      else if (option.takes_value() && !option.bare) std::printf(" -r");
      std::printf(" -d %s\n", quoted(option.help).c_str());
    });
  }
}

int run_completion(const cli::Arguments& arguments) {
  const std::string& shell = arguments.positional.front();
  if (shell == "bash") bash();
  else if (shell == "zsh") zsh();
  else fish();  // the table takes no other name
  return 0;
}

const cli::Registered kCompletionCommand("completion", run_completion);

}  // namespace
