#include "launch/report.hpp"

#include <unistd.h>

#include <cstdio>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>

#include "launch/output.hpp"
#include "launch/process.hpp"

namespace accelerate::launcher {
namespace {

constexpr const char* kName = "accelerate launch: ";

std::string seconds(Clock::duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
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

std::string other_rank(const RankRecord& rank) {
  std::string text = "rank " + std::to_string(rank.rank) + " ";
  const End& end = *rank.end;
  if (end.good()) return text + "ended well";
  if (end.asked && end.signal == SIGTERM) return text + "was stopped by the launcher";
  if (end.asked && end.signal == SIGKILL) return text + "did not stop and was killed by the launcher";
  return text + describe(end) + (end.asked ? " when asked to stop" : "");
}

std::string failure(const Job& job, const LogFiles& logs, const Outcome& outcome) {
  const RankRecord& rank = outcome.ranks[*outcome.first_failure];
  const End& end = *rank.end;
  std::string text = kName;
  text += "rank " + std::to_string(rank.rank) + " of " + std::to_string(job.world_size) +
          (job.distributed() ? " failed first: it " : " failed: it ") + describe(end) + " after " +
          seconds(end.at - rank.started) + ".\n";
  if (job.options.quiet) return text;
  const auto line = [&](const std::string& key, const std::string& value) {
    if (!value.empty()) text += "  " + key + std::string(key.size() < 9 ? 9 - key.size() : 1, ' ') + value + "\n";
  };
  if (const char* why = hint(end)) line("likely", why);
  line("error", error_file_message(logs.of(rank.local_rank).error_file));
  line("process", "pid " + std::to_string(rank.pid) + ", local rank " + std::to_string(rank.local_rank) + " on " +
                      host_name() + ", " + wall_clock());
  line("program", shell_line(job.options.command));
  if (!logs.folder().empty())
    line("logs",
         (logs.folder() / ("attempt_" + std::to_string(job.attempt)) / std::to_string(rank.local_rank)).string());
  std::string others;
  for (const auto& other : outcome.ranks)
    if (&other != &rank) others += (others.empty() ? "" : ", ") + other_rank(other);
  line("others", others);
  if (const auto lines = last_lines(rank.stderr_tail, 20); !lines.empty()) {
    text += "  last lines of its stderr:\n";
    for (const auto& words : lines) text += "    | " + words + "\n";
  }
  return text;
}

}  // namespace

std::string describe(const End& end) {
  if (end.signal) return "was killed by signal " + std::to_string(end.signal) + " (" + signal_name(end.signal) + ")";
  return "ended with exit code " + std::to_string(end.exit_code);
}

std::string report(const Job& job, const LogFiles& logs, const Outcome& outcome) {
  if (outcome.first_failure) return failure(job, logs, outcome);
  if (outcome.stop_signal == 0 || job.options.quiet) return "";
  return kName + ("stopped by " + signal_name(outcome.stop_signal)) + "; " +
         (outcome.killed ? "some ranks did not end by themselves and were killed.\n" : "all ranks have ended.\n");
}

std::string error_file_message(const std::filesystem::path& file) {
  if (file.empty()) return "";
  std::ifstream in(file);
  const auto json = nlohmann::json::parse(in, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return "";
  const auto& message = json["message"];
  if (message.is_string()) return message;
  if (message.is_object() && message.contains("message") && message["message"].is_string()) return message["message"];
  return "";
}

}  // namespace accelerate::launcher
