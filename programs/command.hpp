#pragma once

/// What commands share whose launcher has checked their options against its table: it starts them with what they are
/// about, and pairs of an option and its text.

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <accelerate/utils/error.hpp>
#include <accelerate/utils/progress.hpp>

#include "utils/error_text.hpp"

namespace command {

/// The options that were given.
class Given {
 public:
  /// @param words  pairs, from `first` on
  explicit Given(const std::vector<std::string>& words, size_t first) {
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
  /// Sets what was given; the launcher has checked that it is a number.
  void read(const std::string& name, int64_t& value) const {
    if (const auto given = text(name)) value = std::stoll(*given);
  }
  void read(const std::string& name, double& value) const {
    if (const auto given = text(name)) value = std::stod(*given);
  }

 private:
  std::vector<std::pair<std::string, std::string>> texts_;
};

inline volatile std::sig_atomic_t interrupted = 0;

/// The first signal asks what runs to stop, by `interrupted`; the second one ends the program as it is.
inline void listen_for(int signal) {
  std::signal(signal, [](int) {
    if (interrupted) ::_exit(130);
    interrupted = 1;
  });
}

/// Ends a command that was asked to stop and has cleaned up.
struct Interrupted {};

/// Draws on a terminal only.
class Bar {
 public:
  Bar(std::string description, std::string unit, std::chrono::milliseconds delay = {})
      : description_(std::move(description)), unit_(std::move(unit)), delay_(delay) {}
  void show(int64_t done, int64_t all) {
    if (!::isatty(STDERR_FILENO)) return;
    if (!bar_)
      bar_.emplace(accelerate::ProgressBarOptions{
          .total = all, .description = description_, .unit = unit_, .delay = delay_, .enabled = true});
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

/// main() of `accelerate <name>`. @param about  words before the options @param run  gets all words
inline int main_of(const char* name, size_t about, int argc, char** argv,
                   const std::function<int(const std::vector<std::string>&)>& run) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < about || (words.size() - about) % 2 != 0)
    return std::fprintf(stderr, "accelerate-%s is a part of `accelerate %s`; see `accelerate %s --help`\n", name, name,
                        name),
           64;
  try {
    return run(words);
  } catch (const Interrupted&) {
    return std::fprintf(stderr, "accelerate %s: interrupted, nothing was written\n", name), 130;
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate %s: %s\n", name, error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate %s: unexpected error: %s\n", name, accelerate::text_of(error).c_str());
    return 70;
  }
}

}  // namespace command
