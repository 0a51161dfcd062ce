#pragma once

#include <sys/types.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace cli_test {

/// A real browser without a window: Chromium, spoken to by its DevTools protocol over two pipes.
class Browser {
 public:
  /// The program, or "" when none is installed.
  static std::string program();
  Browser();
  ~Browser();
  Browser(const Browser&) = delete;

  void open(const std::string& url);
  /// The value of an expression of the page.
  nlohmann::json evaluate(const std::string& expression);
  /// Asks again until the expression is true; false when the deadline passes.
  bool wait_until(const std::string& expression, std::chrono::milliseconds deadline = std::chrono::seconds(60));
  /// As a user whose system is set to dark colours.
  void prefer_dark();
  void save_picture(const std::string& file);
  /// Exceptions of scripts, and what the browser complained about (a violated policy, for example), so far.
  const std::vector<std::string>& complaints() const { return complaints_; }
  /// Addresses that the page has asked for.
  const std::vector<std::string>& requests() const { return requests_; }

 private:
  nlohmann::json call(const std::string& method, nlohmann::json parameters = nlohmann::json::object());
  nlohmann::json next_message();
  void note(const nlohmann::json& event);

  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  int64_t calls_ = 0;
  std::string session_, buffer_;
  std::vector<std::string> complaints_, requests_;
};

}  // namespace cli_test
