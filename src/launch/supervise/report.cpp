#include "launch/supervise/report.hpp"

#include <fmt/ranges.h>
#include <unistd.h>

#include <csignal>
#include <ctime>
#include <fstream>
#include <vector>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "launch/job/host.hpp"
#include "launch/job/job.hpp"
#include "launch/job/outcome.hpp"
#include "launch/supervise/log_files.hpp"
#include "launch/system/output.hpp"
#include "launch/system/process.hpp"
#include "utils/saved_exit_code.hpp"

namespace accelerate::launcher {
namespace {

constexpr const char* kName = "accelerate launch: ";

std::string seconds(Clock::duration duration) {
  return fmt::format("{:.1f} s", std::chrono::duration<double>(duration).count());
}

std::string wall_clock() {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M:%S", &local);
  return text;
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

const char* hint(const End& end) {
  switch (end.signal) {
    case SIGKILL:
      return "the kernel was out of memory (see `dmesg`), or somebody used kill -9";
    case SIGSEGV:
      return "an invalid memory access in native code; a core dump or a debugger shows where";
    case SIGBUS:
      return "/dev/shm or a disk is full, or a mapped file was cut short";
    case SIGABRT:
      return "an uncaught exception or a failed assertion; see its last lines";
    case SIGILL:
      return "the program was built for another processor";
    case SIGFPE:
      return "an integer division by zero";
    case SIGTERM:
      return "something outside of this launch asked it to stop (a scheduler?)";
    case SIGPIPE:
      return "the reader of its output went away";
    default:
      return nullptr;
  }
}

std::string shell_line(const std::vector<std::string>& command) {
  std::string line;
  for (const auto& word : command) {
    const bool plain = !word.empty() && word.find_first_of(" \t\n\"'\\$`*?;&|<>()") == std::string::npos;
    line += (line.empty() ? "" : " ") + (plain ? word : "'" + word + "'");
  }
  return line.size() > 400 ? line.substr(0, 400) + " ..." : line;
}

std::string what_became_of(const RankRecord& rank) {
  const End& end = *rank.end;
  const std::string what = end.good()                           ? "ended well"
                           : end.asked && end.signal == SIGTERM ? "was stopped by the launcher"
                           : end.asked && end.signal == SIGKILL ? "did not stop and was killed by the launcher"
                           : end.asked                          ? describe(end) + " when asked to stop"
                                                                : describe(end);
  return fmt::format("rank {} {}", rank.rank, what);
}

std::string failure(const Job& job, const LogFiles& logs, const Outcome& outcome) {
  const RankRecord& rank = outcome.ranks[*outcome.first_failure];
  const End& end = *rank.end;
  std::string text = fmt::format("{}rank {} of {} failed{}: it {} after {}.\n", kName, rank.rank, job.world_size,
                                 job.distributed() ? " first" : "", describe(end), seconds(end.at - rank.started));
  if (job.quiet()) return text;
  const auto line = [&](const char* key, const std::string& value) {
    if (!value.empty()) text += fmt::format("  {:<8} {}\n", key, value);
  };
  if (const char* why = hint(end)) line("likely", why);
  line("error", error_file_message(logs.of(rank.local_rank).error_file));
  line("process", fmt::format("pid {}, local rank {} on {}, {}", rank.pid, rank.local_rank, host_name(), wall_clock()));
  line("program", shell_line(job.command));
  if (!logs.folder().empty())
    line("logs", (logs.folder() / fmt::format("attempt_{}/{}", job.attempt, rank.local_rank)).string());
  std::vector<std::string> others;
  for (const auto& other : outcome.ranks)
    if (&other != &rank) others.push_back(what_became_of(other));
  line("others", fmt::format("{}", fmt::join(others, ", ")));
  if (const auto lines = last_lines(rank.stderr_tail, 20); !lines.empty()) {
    text += "  last lines of its stderr:\n";
    for (const auto& words : lines) text += fmt::format("    | {}\n", words);
  }
  return text;
}

}  // namespace

std::string report(const Job& job, const LogFiles& logs, const Outcome& outcome) {
  if (outcome.first_failure) return failure(job, logs, outcome);
  if (outcome.saved() && !job.quiet())
    return fmt::format(
        "{}{}all ranks have ended with exit code {}, as they do when a signal has made them save: start "
        "again to go on from the checkpoint.\n",
        kName, outcome.stop_signal ? fmt::format("stopped by {}; ", signal_name(outcome.stop_signal)) : "",
        kSavedExitCode);
  if (outcome.stop_signal == 0 || job.quiet()) return "";
  return fmt::format("{}stopped by {}; {}.\n", kName, signal_name(outcome.stop_signal),
                     outcome.killed ? "some ranks did not end by themselves and were killed" : "all ranks have ended");
}

namespace {

/// The error file of a rank, which is the user's program; discarded where it is no JSON.
nlohmann::json read_error_file(const std::filesystem::path& file) {
  std::string text;
  read_file(file, kMostSettingsBytes, text);
  return parse_json<nlohmann::json>(text);
}

}  // namespace

void hand_on_error_file(const Job& job, const Host& host, const LogFiles& logs, const Outcome& outcome) {
  const auto file = host.variable("TORCHELASTIC_ERROR_FILE");
  if (!file || !job.distributed()) return;  // one rank writes there itself
  std::error_code ignored;
  if (!outcome.first_failure) {
    if (job.attempt > 0) std::filesystem::remove(*file, ignored);
    return;
  }
  const RankRecord& rank = outcome.ranks[*outcome.first_failure];
  auto json = read_error_file(logs.of(rank.local_rank).error_file);
  if (!json.is_object() || !json.contains("message"))
    json = {{"message",
             {{"message", fmt::format("rank {} of {} {}", rank.rank, job.world_size, describe(*rank.end))},
              {"extraInfo", {{"timestamp", std::to_string(std::time(nullptr))}}}}}};
  if (json["message"].is_object()) json["message"]["errorCode"] = outcome.exit_code();
  std::ofstream(*file) << json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string error_file_message(const std::filesystem::path& file) {
  if (file.empty()) return "";
  const auto json = read_error_file(file);
  if (!json.is_object() || !json.contains("message")) return "";
  const auto& message = json["message"];
  if (message.is_string()) return message;
  if (message.is_object() && message.contains("message") && message["message"].is_string()) return message["message"];
  return "";
}

}  // namespace accelerate::launcher
