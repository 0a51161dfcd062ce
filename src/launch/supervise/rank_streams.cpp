#include "launch/supervise/rank_streams.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "launch/job/job.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {
namespace {

bool same_file(int a, int b) {
  struct stat first {
  }, second{};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

Fd open_log(const std::filesystem::path& file) {
  Fd fd(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!fd && errno == ELOOP)
    raise<LaunchError>(
        "the log file {} is a link, through which somebody else could name what is overwritten: remove it",
        file.string());
  if (!fd) raise<LaunchError>("the log file {} can't be opened: {}", file.string(), std::strerror(errno));
  return fd;
}

/// As torchrun marks lines; a pattern of its own is one of Python's string.Template.
std::string mark_of(const Job& job, int64_t local_rank) {
  const std::string role = job.settings.text("role"), here = std::to_string(local_rank);
  const char* pattern = std::getenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (!pattern) return fmt::format("[{}{}]:", role, here);
  const std::pair<const char*, std::string> words[] = {
      {"role_name", role}, {"local_rank", here}, {"rank", std::to_string(job.rank(local_rank))}};
  std::string result;
  for (std::string_view rest = pattern; !rest.empty();) {
    const size_t dollar = std::min(rest.find('$'), rest.size());
    result += rest.substr(0, dollar);
    rest.remove_prefix(dollar);
    if (rest.empty()) break;
    size_t taken = rest.starts_with("$$") ? 2 : 1;
    std::string text = "$";
    for (const auto& [name, value] : words) {
      const std::string plain = fmt::format("${}", name), braced = fmt::format("${{{}}}", name);
      const bool in_braces = rest.starts_with(braced);
      if (taken > 1 || (!in_braces && !rest.starts_with(plain))) continue;
      text = value;
      taken = in_braces ? braced.size() : plain.size();
    }
    result += text;
    rest.remove_prefix(taken);
  }
  return result;
}

std::string end_of(const std::filesystem::path& file, std::streamoff bytes) {
  std::ifstream log(file, std::ios::binary | std::ios::ate);
  log.seekg(std::max<std::streamoff>(0, log.tellg() - bytes));
  return {std::istreambuf_iterator<char>(log), {}};
}

}  // namespace

RankStreams::RankStreams(const Job& job, const LogFiles& logs, bool watched)
    : job_(job),
      logs_(logs),
      direct_(!watched && job.remote.empty()),
      out_(STDOUT_FILENO),
      err_(STDERR_FILENO),
      errors_(same_file(STDOUT_FILENO, STDERR_FILENO) ? &out_ : &err_) {}

RankStreams::Ends RankStreams::connect(int64_t local_rank) {
  return {connect(local_rank, kStdout), connect(local_rank, kStderr)};
}

/// A terminal is the first rank's, so that colours, prompts and debuggers are as they are without a launcher.
bool RankStreams::is_direct(int64_t local_rank, Streams kind) const {
  return direct_ &&
         (job_.local_world_size == 1 || (local_rank == 0 && ::isatty(kind == kStdout ? STDOUT_FILENO : STDERR_FILENO)));
}

Fd RankStreams::connect(int64_t local_rank, Streams kind) {
  const RankLogs& logs = logs_.of(local_rank);
  const auto& file = kind == kStdout ? logs.stdout_file : logs.stderr_file;
  if (!(kind == kStdout ? logs.stdout_on_terminal : logs.stderr_on_terminal)) return open_log(file);
  if (is_direct(local_rank, kind) && file.empty()) return {};
  Pipe pipe = make_pipe();
  passing_.push_back(
      {local_rank, kind,
       LineForwarder(std::move(pipe.read), {.sink = kind == kStdout ? &out_ : errors_,
                                            .prefix = logs.marked & kind ? mark_of(job_, local_rank) : "",
                                            .log = file.empty() ? Fd() : open_log(file),
                                            .log_name = file.string()})});
  return std::move(pipe.write);
}

void RankStreams::add_to(std::vector<pollfd>& fds) {
  polled_.clear();
  for (auto& stream : passing_)
    if (const int fd = stream.forwarder.wants(); fd >= 0)
      fds.push_back({fd, POLLIN, 0}), polled_.push_back(&stream.forwarder);
  for (Sink* sink : {&out_, &err_})
    if (sink->pending()) fds.push_back({sink->fd(), POLLOUT, 0});
}

void RankStreams::serve(std::span<const pollfd> polled, Clock::time_point now) {
  for (size_t i = 0; i < polled_.size(); ++i)
    if (polled[i].revents) polled_[i]->read_some(now);
  out_.flush();
  err_.flush();
}

bool RankStreams::finished() const {
  return !pending() &&
         std::all_of(passing_.begin(), passing_.end(), [](const auto& s) { return s.forwarder.finished(); });
}

void RankStreams::close() {
  for (auto& stream : passing_) stream.forwarder.finish();
}

void RankStreams::describe_end(RankRecord& rank) const {
  constexpr std::streamoff kBytes = 16 << 10;
  for (const auto& stream : passing_)
    if (stream.local_rank == rank.local_rank && stream.kind == kStderr)
      rank.last_word = stream.forwarder.last_word(), rank.stderr_tail = stream.forwarder.tail();
  const auto& file = logs_.of(rank.local_rank).stderr_file;
  if (!file.empty() && rank.stderr_tail.empty()) rank.stderr_tail = end_of(file, kBytes);
}

std::string RankStreams::last_line(int64_t local_rank) const {
  std::optional<Clock::time_point> when;
  std::vector<std::string> last;
  for (const auto& [owner, kind, forwarder] : passing_) {
    if (owner != local_rank || forwarder.tail().empty() || (when && forwarder.last_word() <= when)) continue;
    when = forwarder.last_word();
    last = last_lines(forwarder.tail(), 1);
  }
  const RankLogs& logs = logs_.of(local_rank);
  for (const auto* file : {&logs.stderr_file, &logs.stdout_file})
    if (last.empty() && !file->empty()) last = last_lines(end_of(*file, 4 << 10), 1);
  return last.empty() ? "" : last.front();
}

}  // namespace accelerate::launcher
