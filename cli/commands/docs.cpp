#include <cstdio>
#include <cstring>

#include "../command.hpp"
#include "accelerate/version.hpp"

namespace {

using accelerate::config::CommandTable;
using accelerate::config::command_tables;
using accelerate::config::kAdditions;
using accelerate::config::Option;

std::string names_of(const Option& option) {
  std::string names;
  for (const auto& spelling : option.spellings())
    if (option.positional() || spelling.find('-', 2) == std::string::npos) names += (names.empty() ? "" : ", ") + spelling;
  if (option.positional()) return option.value;
  if (names.empty()) return "";
  return names + (option.takes_value() && option.value ? " " + std::string(option.value) : "");
}

std::string key_of(const Option& option) {
  if (!option.section) return "";
  return *option.section ? option.section + std::string(": ") + option.name : option.name;
}

/// What a cell of a table can't hold as it is.
std::string cell(const std::string& text) {
  std::string result;
  for (char c : text) result += c == '|' ? "\\|" : c == '<' ? "&lt;" : std::string(1, c);
  return result;
}

std::string code(const std::string& text) { return text.empty() ? "" : "`" + cell(text) + "`"; }

void markdown_rows(std::span<const Option> options) {
  std::printf("| flag | key in config files | variable | default | what it says |\n|---|---|---|---|---|\n");
  for (const auto& option : options) {
    std::string help = option.help;
    if (option.choices) help += ": " + std::string(option.choices);
    std::printf("| %s | %s | %s | %s | %s |\n", code(names_of(option)).c_str(), code(key_of(option)).c_str(), code(option.variable ? option.variable : "").c_str(),
                code(option.fallback && option.takes_value() ? option.fallback : "").c_str(), cell(help).c_str());
  }
  std::printf("\n");
}

void markdown() {
  std::printf(
      "# Settings\n\n"
      "Written by `accelerate docs markdown`; a test compares them. Every setting stands in one table of the program, which also makes the flags, `--help`, the completions, the manual page and the\n"
      "reading of config files.\n\n"
      "A flag wins over an environment variable, that over the config file, that over the default. Flags may be written with `-` for `_`. Config files are read from `--config_file`, else from\n"
      "`$HF_HOME/accelerate/default_config.yaml`, else from `$XDG_CACHE_HOME/huggingface/accelerate/` or `~/.cache/huggingface/accelerate/`; with `--cpu` only from `--config_file`. They are those of\n"
      "Hugging Face Accelerate, in both directions. A flag that has no effect together with the others is named on stderr; an unknown key or flag is an error that names the nearest one.\n\n"
      "Variables are what started processes find, and what the launcher reads where the flag is not given.\n\n");
  for (const auto& table : command_tables()) {
    std::printf("## accelerate %s\n\n%s: `%s`\n\n", table.name, table.summary, cell(table.usage).c_str());
    for (const auto& group : table.groups) {
      if (*group.title) std::printf("### %s\n\n", group.title);
      markdown_rows(group.options);
    }
  }
  std::printf("## Config files for Amazon SageMaker\n\n[sagemaker.md](sagemaker.md) says what is made of them.\n\n");
  markdown_rows(accelerate::config::sagemaker_keys());
}

std::string roff(const std::string& text) {
  std::string result;
  for (char c : text) result += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  return result.starts_with('.') || result.starts_with('\'') ? "\\&" + result : result;
}

void man() {
  std::printf(".TH ACCELERATE 1 \"\" \"accelerate %s\" \"User Commands\"\n.SH NAME\naccelerate \\- train on one process or many, with the same program\n"
              ".SH SYNOPSIS\n.B accelerate\n.I COMMAND\n[options]\n.SH DESCRIPTION\nOptions may be written with \\- for _. A flag wins over an environment variable, that over the config file, that over the default.\n", ACCELERATE_VERSION);
  for (const auto& table : command_tables()) {
    std::printf(".SH %s\n%s.\n.PP\n.B %s\n", roff("accelerate " + std::string(table.name)).c_str(), roff(table.summary).c_str(), roff(table.usage).c_str());
    for (const auto& group : table.groups) {
      bool first = true;
      for (const auto& option : group.options) {
        if (names_of(option).empty()) continue;
        if (first && *group.title) std::printf(".SS %s\n", roff(group.title).c_str());
        first = false;
        std::printf(".TP\n.B %s\n%s%s.\n", roff(names_of(option)).c_str(), roff(option.help).c_str(), option.choices ? roff(": " + std::string(option.choices)).c_str() : "");
      }
    }
  }
  std::printf(".SH FILES\n.I $HF_HOME/accelerate/default_config.yaml\n.br\n.I ~/.cache/huggingface/accelerate/default_config.yaml\n"
              ".SH EXIT STATUS\n0, or the exit status of the process that failed first (128 + signal number if a signal ended it). Of the program itself: 64 a mistake on the command line or in a config "
              "file, 65 damaged files, 71 something can't be started, 73 no memory or disk, or a file is in the way, 78 this build or machine lacks something, 70 a defect.\n");
}

int run(const cli::Arguments& arguments) {
  const std::string& form = arguments.positional.front();
  if (form == "markdown") markdown();
  else man();  // the table takes no other name
  return 0;
}

const cli::Registered kRegistered("docs", run);

}  // namespace
