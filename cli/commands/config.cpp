#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "accelerate/config.hpp"
#include "command.hpp"
#include "utils/raise.hpp"

namespace {

/// Puts the terminal into a state where keys arrive one by one, for as long as it lives.
class RawTerminal {
 public:
  RawTerminal() {
    ::tcgetattr(STDIN_FILENO, &before_);
    termios raw = before_;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
  }
  ~RawTerminal() { ::tcsetattr(STDIN_FILENO, TCSADRAIN, &before_); }
  RawTerminal(const RawTerminal&) = delete;
  RawTerminal& operator=(const RawTerminal&) = delete;

 private:
  termios before_{};
};

struct QuestionInterrupted {};

char byte() {
  char c = 0;
  const ssize_t got = ::read(STDIN_FILENO, &c, 1);
  if (got < 0) accelerate::raise<accelerate::ConfigError>("the terminal can't be read: {}", std::strerror(errno));
  if (got == 0) throw accelerate::ConfigError("the input ended before the last question. Nothing was written");
  return c;
}

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

/// Questions with answers in lines: numbers for choices. For pipes, and for text on a terminal.
class Lines : public accelerate::Dialog {
 public:
  size_t choose(const std::string& question, const std::vector<std::string>& choices, size_t usual) override {
    const bool yes_no = choices == std::vector<std::string>{"no", "yes"};
    for (;;) {
      if (yes_no) {
        std::printf("%s %s ", question.c_str(), usual ? "[YES/no]" : "[yes/NO]");
      } else {
        std::printf("%s\n", question.c_str());
        for (size_t i = 0; i < choices.size(); ++i) std::printf("  [%zu] %s\n", i, choices[i].c_str());
        std::printf("Number [%zu]: ", usual);
      }
      const std::string answer = line();
      if (answer.empty()) return usual;
      if (const auto index = index_of(answer, choices)) return *index;
      const auto nearest = accelerate::nearest_name(answer, choices);
      if (yes_no) say("'" + answer + "' is neither yes nor no.");
      else
        say("'" + answer + "' is not a number from 0 to " + std::to_string(choices.size() - 1) +
            (nearest ? ". Did you mean '" + *nearest + "'?" : "."));
    }
  }

  std::string ask(const std::string& question, const std::string& usual) override {
    std::printf(usual.empty() ? "%s " : "%s [%s] ", question.c_str(), usual.c_str());
    const std::string answer = line();
    return answer.empty() ? usual : answer;
  }

  void say(const std::string& line) override { std::printf("%s\n", line.c_str()); }

 protected:
  static std::optional<size_t> index_of(const std::string& answer, const std::vector<std::string>& choices) {
    for (size_t i = 0; i < choices.size(); ++i)
      if (::strcasecmp(answer.c_str(), choices[i].c_str()) == 0 ||
          (choices[i] == "yes" && ::strcasecmp(answer.c_str(), "y") == 0) ||
          (choices[i] == "no" && ::strcasecmp(answer.c_str(), "n") == 0))
        return i;
    if (answer.size() > 4 || answer.find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
    const size_t index = std::stoul(answer);
    return index < choices.size() ? std::optional(index) : std::nullopt;
  }

  virtual std::string line() {
    std::fflush(stdout);
    std::string text;
    for (char c; (c = next()) != '\n';) text += c;
    if (trimmed(text) == "<") throw Back();
    return trimmed(text);
  }

 private:
  static char next() {
    const int c = std::getchar();
    if (c == EOF) throw accelerate::ConfigError("the input ended before the last question. Nothing was written");
    return static_cast<char>(c);
  }
};

/// Choices by arrow keys.
class Menus : public Lines {
 public:
  size_t choose(const std::string& question, const std::vector<std::string>& choices, size_t usual) override {
    const RawTerminal raw;
    std::printf("%s\n", question.c_str());
    size_t at = usual;
    std::string typed;  // since the last key that was none of a number or a word
    for (bool first = true;; first = false) {
      if (!first) std::printf("\x1b[%zuA", choices.size());
      for (size_t i = 0; i < choices.size(); ++i)
        std::printf("\r\x1b[K%s %s\x1b[0m\n", i == at ? "\x1b[36m  >" : "   ", choices[i].c_str());
      std::fflush(stdout);
      const char key = byte();
      if (key == 3) throw QuestionInterrupted();  // Ctrl-C
      if (key == 4) throw accelerate::ConfigError("the input ended before the last question. Nothing was written");
      if (key == '\r' || key == '\n') break;
      if (key == 27) {
        if (byte() != '[') continue;
        const char arrow = byte();
        if (arrow == 'A') at = (at + choices.size() - 1) % choices.size();
        if (arrow == 'B') at = (at + 1) % choices.size();
        if (arrow == 'D') throw Back();
        typed.clear();
      } else if (key == 'k' && typed.empty()) {
        at = (at + choices.size() - 1) % choices.size();
      } else if (key == 'j' && typed.empty()) {
        at = (at + 1) % choices.size();
      } else if (key == '<') {
        throw Back();
      } else {
        // A number, or the beginning of a choice; what continues none begins a new one.
        typed += key;
        auto found = beginning_with(typed, choices);
        if (!found) found = beginning_with(typed = key, choices);
        if (!found) typed.clear();
        at = found.value_or(at);
      }
    }
    // The choice stays in place of the menu.
    std::printf("\x1b[%zuA\x1b[J  %s\n", choices.size(), choices[at].c_str());
    return at;
  }

 private:
  static std::optional<size_t> beginning_with(const std::string& typed, const std::vector<std::string>& choices) {
    if (const auto index = index_of(typed, choices)) return index;
    for (size_t i = 0; i < choices.size(); ++i)
      if (::strncasecmp(choices[i].c_str(), typed.c_str(), typed.size()) == 0) return i;
    return std::nullopt;
  }
};

int run_config(const cli::Arguments& arguments) {
  if (!arguments.positional.empty()) return 64;
  std::filesystem::path file = arguments.text("config_file");
  if (file.empty()) file = accelerate::default_config_file();
  const bool terminal = ::isatty(STDIN_FILENO) && ::isatty(STDOUT_FILENO);
  std::printf(terminal ? "Arrow keys or numbers choose, Enter confirms, the left arrow (or <) goes back.\n"
                       : "An empty answer takes what stands in brackets; < goes back.\n");
  std::setvbuf(stdin, nullptr, _IONBF, 0);  // menus read the same stream by themselves
  Lines lines;
  Menus menus;
  try {
    const std::string text = accelerate::ask_config(terminal ? menus : lines, file);
    std::printf("\nWritten to %s:\n\n%s", file.c_str(), text.c_str());
    return 0;
  } catch (const QuestionInterrupted&) {
    std::printf("\nNothing was written.\n");
    return 130;
  }
}

const cli::Registered kConfigCommand("config", run_config);

}  // namespace
