#pragma once

/// Code that commands share whose options the launcher has checked against its table: it starts them with their
/// subject, and pairs of an option and its text.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <accelerate/utils/error.hpp>
#include <accelerate/utils/progress.hpp>

#include "input/plain_text.hpp"
#include "utils/error_text.hpp"
#include "utils/leave_libtorch.hpp"
#include "utils/program_help.hpp"
#include "utils/raise.hpp"

namespace command {

/// The options that were given.
class GivenOptions {
 public:
  /// @param words  pairs, from `first` on
  explicit GivenOptions(const std::vector<std::string>& words, size_t first) {
    for (size_t i = first; i + 1 < words.size(); i += 2) texts_.emplace_back(words[i].substr(2), words[i + 1]);
  }
  std::vector<std::string> all(const std::string& name) const {
    std::vector<std::string> result;
    for (const auto& [key, text] : texts_)
      if (key == name) result.push_back(text);
    return result;
  }
  std::optional<std::string> text(const std::string& name) const {
    const auto found = all(name);
    return found.empty() ? std::nullopt : std::optional(found.back());
  }
  bool on(const std::string& name) const { return text(name) == "true"; }
  std::optional<int64_t> whole(const std::string& name, int64_t least = std::numeric_limits<int64_t>::min(),
                               int64_t most = std::numeric_limits<int64_t>::max()) const {
    const auto value = number<int64_t>(name, "a whole number");
    if (value && (*value < least || *value > most))
      accelerate::raise<accelerate::ConfigError>("--{} is {}, expected {}", name, *value,
                                                 most == std::numeric_limits<int64_t>::max()
                                                     ? fmt::format("{} or more", least)
                                                     : fmt::format("a number from {} to {}", least, most));
    return value;
  }
  std::optional<double> real(const std::string& name) const {
    const auto value = number<double>(name, "a number");
    if (value && !std::isfinite(*value))
      accelerate::raise<accelerate::ConfigError>("--{} is {}, expected a finite number", name, *value);
    return value;
  }
  /// Sets what was given.
  void read(const std::string& name, int64_t& value) const { value = whole(name).value_or(value); }
  void read(const std::string& name, double& value) const { value = real(name).value_or(value); }
  /// More than a large machine has would only take memory: for each one its stack, and in the end none is left.
  std::optional<int> threads() const { return whole("num_threads", 1, 1024); }

 private:
  template <class Number> std::optional<Number> number(const std::string& name, const char* expected) const {
    const auto given = text(name);
    if (!given) return std::nullopt;
    Number value{};
    const char *const begin = given->data() + given->starts_with('+'), *const end = given->data() + given->size();
    if (const auto [rest, error] = std::from_chars(begin, end, value); error == std::errc() && rest == end)
      return value;
    accelerate::raise<accelerate::ConfigError>("--{} is '{}', expected {}", name, *given, expected);
  }

  std::vector<std::pair<std::string, std::string>> texts_;
};

inline volatile std::sig_atomic_t interrupted = 0;  ///< the signal

/// As shells have it.
inline int exit_code_of(int signal) { return 128 + signal; }

/// The first signal asks what runs to stop, by `interrupted`; the second one ends the program as it is. The end of a
/// terminal that is to be ignored (nohup) still is.
inline void listen_for(int signal) {
  const auto before = std::signal(signal, [](int number) {
    if (interrupted) ::_exit(exit_code_of(number));
    interrupted = number;
  });
  if (signal == SIGHUP && before == SIG_IGN) std::signal(signal, SIG_IGN);
}

/// Ends a command that was asked to stop and has cleaned up.
struct Interrupted {
  std::string outcome = "nothing was written";
};

/// A bar on a terminal, and lines in the log of what takes longer than a moment.
class Bar {
 public:
  Bar(std::string description, std::string unit, std::chrono::milliseconds delay = {})
      : description_(std::move(description)), unit_(std::move(unit)), delay_(delay) {}
  void show(int64_t done, int64_t all) {
    constexpr std::chrono::milliseconds kMoment{5000};
    const auto delay = ::isatty(STDERR_FILENO) ? delay_ : std::max(delay_, kMoment);
    if (!bar_)
      bar_.emplace(accelerate::ProgressBarOptions{
          .total = all, .description = description_, .unit = unit_, .delay = delay, .enabled = true});
    bar_->update(done - bar_->count());
  }
  void finish(int64_t all) {
    if (bar_) bar_->update(all - bar_->count());
    bar_.reset();
  }

 private:
  std::string description_, unit_;
  std::chrono::milliseconds delay_;
  std::optional<accelerate::ProgressBar> bar_;
};

/// @throws ResourceError if something that was written to standard output got lost
inline void flush_output() {
  std::cout.flush();
  if (std::fflush(stdout) != 0 || std::ferror(stdout) || !std::cout)
    accelerate::raise<accelerate::ResourceError>(
        "standard output can't be written, and what it had to say is lost; all else was done. Is the disk full?");
}

/// main() of `accelerate <name>`. @param about  words before the options @param run  gets all words
inline int main_of(const char* name, size_t about, int argc, char** argv,
                   const std::function<int(const std::vector<std::string>&)>& run) {
  show_help_if_asked(argc, argv, name);
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < about || (words.size() - about) % 2 != 0)
    return std::fprintf(stderr, "accelerate-%s is a part of `accelerate %s`; see `accelerate %s --help`\n", name, name,
                        name),
           64;
  try {
    const int code = run(words);
    flush_output();
    return code;
  } catch (const Interrupted& end) {
    std::fprintf(stderr, "accelerate %s: interrupted, %s\n", name, end.outcome.c_str());
    return exit_code_of(interrupted);
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate %s: %s\n", name, accelerate::plain_lines(error.what()).c_str());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate %s: unexpected error: %s\n", name,
                 accelerate::plain_lines(accelerate::text_of(error)).c_str());
    return 70;
  }
}

}  // namespace command
