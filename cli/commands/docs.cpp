#include <cstdio>
#include <cstring>

#include "accelerate/utils/version.hpp"
#include "command.hpp"

namespace {

using accelerate::config::command_tables;
using accelerate::config::CommandTable;
using accelerate::config::kAdditions;
using accelerate::config::Option;

std::string names_of(const Option& option) {
  std::string names;
  for (const auto& spelling : option.spellings())
    if (option.positional() || spelling.find('-', 2) == std::string::npos)
      names += (names.empty() ? "" : ", ") + spelling;
  if (option.positional()) return option.value;
  if (names.empty()) return "";
  if (option.bare) return names + "[=" + option.value + "]";
  return names + (option.takes_value() && option.value ? " " + std::string(option.value) : "");
}

std::string key_of(const Option& option) {
  if (!option.section) return "";
  return *option.section ? option.section + std::string(": ") + option.name : option.name;
}

/// Escapes characters that a cell of a table can't hold as they are.
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
    std::printf("| %s | %s | %s | %s | %s |\n", code(names_of(option)).c_str(), code(key_of(option)).c_str(),
                code(option.variable ? option.variable : "").c_str(),
                code(option.takes_value() ? option.default_text() : "").c_str(), cell(help).c_str());
  }
  std::printf("\n");
}

/// The exit codes of the program: sysexits.h's numbers for its own troubles.
constexpr std::pair<const char*, const char*> kExitCodes[] = {
    {"0", "all processes returned 0"},
    {"1 to 255",
     "what the process returned that failed first, on whichever machine; 128 + its number where a signal ended it "
     "(137: SIGKILL). A process that fails because its peer did is not taken for the cause"},
    {"64",
     "a mistake on the command line, in a config file or in a variable; machines that were started with different "
     "settings, or with another token"},
    {"65", "damaged files; with --receipts=strict, a setting that was asked for and had no effect"},
    {"69", "a machine was lost, or the one that hosts the rendezvous has gone"},
    {"70", "a defect of this program"},
    {"71",
     "something can't be started or reached: a program, a busy port, machines that did not come in time, an agent that "
     "died"},
    {"73", "no memory, disk or processes, or a file is in the way"},
    {"75", "a signal came, and all processes have saved a checkpoint before they ended: start again to go on from it"},
    {"78", "this build or this machine lacks what was asked for"},
    {"129, 130, 143", "the launcher was stopped by SIGHUP, Ctrl-C, SIGTERM; its processes have been stopped too"},
};

void markdown() {
  std::printf(
      "# Settings\n\n"
      "Written by `accelerate docs markdown`; a test compares them. Every setting stands in one table of the program, "
      "which also makes the flags, `--help`, the completions, the manual page and the\n"
      "reading of config files.\n\n"
      "A flag wins over an environment variable, that over the config file, that over the default. Flags may be "
      "written with `-` for `_`. Config files are read from `--config_file`, else from\n"
      "`$HF_HOME/accelerate/default_config.yaml`, else from `$XDG_CACHE_HOME/huggingface/accelerate/` or "
      "`~/.cache/huggingface/accelerate/`; with `--cpu` only from `--config_file`. They are those of\n"
      "Hugging Face Accelerate, in both directions. A flag that has no effect together with the others is named on "
      "stderr, and so is a key of a section that nobody reads; an unknown flag, or key at the top of a file, is an "
      "error that names the nearest one.\n\n"
      "Variables are what started processes find, and what the launcher reads where the flag is not given.\n\n");
  for (const auto& table : command_tables()) {
    std::printf("## accelerate %s\n\n%s: `%s`\n\n", table.name, table.summary, cell(table.usage).c_str());
    for (const auto& group : table.groups) {
      if (*group.title) std::printf("### %s\n\n", group.title);
      markdown_rows(group.options);
    }
  }
  std::printf(
      "## Exit codes\n\nThose of `accelerate launch`; other commands use the same numbers for the same troubles.\n\n| "
      "code | |\n|---|---|\n");
  for (const auto& [exit_code, meaning] : kExitCodes) std::printf("| %s | %s |\n", exit_code, cell(meaning).c_str());
  std::printf("\n## Config files for Amazon SageMaker\n\n[sagemaker.md](sagemaker.md) says what is made of them.\n\n");
  markdown_rows(accelerate::config::sagemaker_keys());
}

std::string roff(const std::string& text) {
  std::string result;
  for (char c : text) result += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  return result.starts_with('.') || result.starts_with('\'') ? "\\&" + result : result;
}

void man() {
  std::printf(
      ".TH ACCELERATE 1 \"\" \"accelerate %s\" \"User Commands\"\n.SH NAME\naccelerate \\- train on one process or "
      "many, with the same program\n"
      ".SH SYNOPSIS\n.B accelerate\n.I COMMAND\n[options]\n.SH DESCRIPTION\nOptions may be written with \\- for _. A "
      "flag wins over an environment variable, that over the config file, that over the default.\n",
      ACCELERATE_VERSION);
  for (const auto& table : command_tables()) {
    std::printf(".SH %s\n%s.\n.PP\n.B %s\n", roff("accelerate " + std::string(table.name)).c_str(),
                roff(table.summary).c_str(), roff(table.usage).c_str());
    for (const auto& group : table.groups) {
      bool first = true;
      for (const auto& option : group.options) {
        if (names_of(option).empty()) continue;
        if (first && *group.title) std::printf(".SS %s\n", roff(group.title).c_str());
        first = false;
        std::printf(".TP\n.B %s\n%s%s.\n", roff(names_of(option)).c_str(), roff(option.help).c_str(),
                    option.choices ? roff(": " + std::string(option.choices)).c_str() : "");
      }
    }
  }
  std::printf(
      ".SH FILES\n.I $HF_HOME/accelerate/default_config.yaml\n.br\n.I "
      "~/.cache/huggingface/accelerate/default_config.yaml\n"
      ".SH EXIT STATUS\n");
  for (const auto& [exit_code, meaning] : kExitCodes) std::printf(".TP\n%s\n%s.\n", exit_code, roff(meaning).c_str());
}

int run_docs(const cli::Arguments& arguments) {
  const std::string& form = arguments.positional.front();
  if (form == "markdown") markdown();
  else man();  // the table takes no other name
  return 0;
}

const cli::Registered kDocsCommand("docs", run_docs);

}  // namespace
