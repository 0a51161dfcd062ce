#include "browser.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "ranks.hpp"

namespace cli_test {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

namespace {

std::string from_base64(const std::string& text) {
  const std::string digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string bytes;
  uint32_t bits = 0;
  int count = 0;
  for (const char c : text) {
    const size_t value = digits.find(c);
    if (value == std::string::npos) break;
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) bytes += static_cast<char>(bits >> (count -= 8) & 0xFF);
  }
  return bytes;
}

}  // namespace

std::string Browser::program() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
      if (const std::string file = folder + "/" + name; ::access(file.c_str(), X_OK) == 0) return file;
  return "";
}

Browser::Browser() {
  const std::string profile = support::scratch_dir() + "/browser_" + std::to_string(::getpid());
  std::filesystem::create_directories(profile);
  const std::string file = program(), profile_option = "--user-data-dir=" + profile;
  int to[2], from[2];
  if (::pipe2(to, O_CLOEXEC) || ::pipe2(from, O_CLOEXEC)) throw std::runtime_error("no pipes");
  pid_ = ::fork();
  if (pid_ == 0) {
    ::setpgid(0, 0);
    // The protocol's descriptors are 3 and 4; ours may be just these, so move them out of the way first.
    const int in = ::fcntl(to[0], F_DUPFD, 10), out = ::fcntl(from[1], F_DUPFD, 10),
              log = ::open((profile + "/log").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(log, 1), ::dup2(log, 2);
    ::dup2(in, 3), ::dup2(out, 4);
    ::close_range(5, ~0U, 0);
    ::setenv("HOME", profile.c_str(), 1);
    ::execl(file.c_str(), file.c_str(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--window-size=1200,500", "--remote-debugging-pipe", profile_option.c_str(), "about:blank", nullptr);
    ::_exit(127);
  }
  ::setpgid(pid_, pid_);
  ::close(to[0]), ::close(from[1]);
  to_ = to[1], from_ = from[0];
  const std::string target = call("Target.createTarget", {{"url", "about:blank"}}).at("targetId");
  session_ = call("Target.attachToTarget", {{"targetId", target}, {"flatten", true}}).at("sessionId");
  for (const char* domain : {"Page", "Runtime", "Log", "Network"}) call(std::string(domain) + ".enable");
}

Browser::~Browser() {
  ::close(to_), ::close(from_);
  ::kill(-pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

json Browser::next_message() {
  const auto deadline = Clock::now() + std::chrono::seconds(60);  // a cold start on a busy machine
  for (;;) {
    if (const size_t end = buffer_.find('\0'); end != std::string::npos) {
      json message = json::parse(buffer_.substr(0, end));
      buffer_.erase(0, end + 1);
      return message;
    }
    pollfd ready{from_, POLLIN, 0};
    char bytes[65536];
    const int found = ::poll(&ready, 1, 1000);
    if (found == 0 && Clock::now() > deadline) throw std::runtime_error("the browser does not answer");
    const ssize_t got = found > 0 ? ::read(from_, bytes, sizeof(bytes)) : 1;
    if (got <= 0)
      throw std::runtime_error("the browser has ended; see its log in " + support::scratch_dir() + "/browser_" +
                               std::to_string(::getpid()));
    if (found > 0) buffer_.append(bytes, static_cast<size_t>(got));
  }
}

void Browser::note(const json& event) {
  const std::string method = event.value("method", "");
  if (method == "Runtime.exceptionThrown") complaints_.push_back(event["params"].dump());
  if (method == "Log.entryAdded" && event["params"]["entry"]["level"] == "error")
    complaints_.push_back(event["params"]["entry"].dump());
  if (method == "Network.requestWillBeSent") requests_.push_back(event["params"]["request"]["url"]);
}

json Browser::call(const std::string& method, json parameters) {
  json message{{"id", ++calls_}, {"method", method}, {"params", std::move(parameters)}};
  if (!session_.empty()) message["sessionId"] = session_;
  std::string text = message.dump();
  text += '\0';
  if (::write(to_, text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    throw std::runtime_error("the browser does not listen");
  for (;;) {
    const json answer = next_message();
    if (!answer.contains("id")) note(answer);
    else if (answer["id"] == calls_) {
      if (answer.contains("error")) throw std::runtime_error(method + ": " + answer["error"].dump());
      return answer.at("result");
    }
  }
}

void Browser::open(const std::string& url) {
  const json answer = call("Page.navigate", {{"url", url}});
  if (answer.contains("errorText")) throw std::runtime_error(url + " does not open: " + answer.dump());
}

json Browser::evaluate(const std::string& expression) {
  const json result =
      call("Runtime.evaluate", {{"expression", expression}, {"returnByValue", true}, {"awaitPromise", true}});
  if (result.contains("exceptionDetails"))
    throw std::runtime_error(expression + ": " + result["exceptionDetails"].dump());
  return result["result"].value("value", json());
}

bool Browser::wait_until(const std::string& expression, std::chrono::milliseconds deadline) {
  for (const auto end = Clock::now() + deadline; Clock::now() < end;
       std::this_thread::sleep_for(std::chrono::milliseconds(100)))
    if (evaluate("Boolean(" + expression + ")") == true) return true;
  return false;
}

void Browser::prefer_dark() {
  call("Emulation.setEmulatedMedia",
       {{"features", json::array({{{"name", "prefers-color-scheme"}, {"value", "dark"}}})}});
}

void Browser::save_picture(const std::string& file) {
  const std::string bytes = from_base64(call("Page.captureScreenshot").at("data"));
  std::ofstream(file, std::ios::binary) << bytes;
}

}  // namespace cli_test
