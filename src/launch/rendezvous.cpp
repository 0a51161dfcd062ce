#include "launch/rendezvous.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "accelerate/config.hpp"
#include "accelerate/utils/error.hpp"
#include "config/value.hpp"
#include "launch/job.hpp"
#include "launch/monitor/monitor.hpp"

namespace accelerate::launcher {
namespace {

using nlohmann::json;
using std::chrono::milliseconds;

double number(const std::string& key, const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value) || value < 0 || value > 1e9)
    throw ConfigError("--rdzv_conf has " + key + "=" + text + ", expected a number that is not negative");
  return value;
}

milliseconds time(const std::string& key, const std::string& text) {
  const double seconds = number(key, text);
  if (seconds == 0) throw ConfigError("--rdzv_conf has " + key + "=0, expected a time in seconds");
  return milliseconds(std::max<int64_t>(1, std::llround(seconds * 1000)));
}

std::string read_token(const std::string& file) {
  std::ifstream in(file);
  std::string token;
  if (!in || !std::getline(in, token))
    throw ConfigError("--rdzv_conf token_file=" + file +
                      " can't be read, or is empty. Write the shared secret in its first line, for example by `openssl "
                      "rand -hex 32`");
  const auto mode = std::filesystem::status(file).permissions();
  if ((mode & (std::filesystem::perms::group_read | std::filesystem::perms::others_read)) !=
      std::filesystem::perms::none)
    throw ConfigError("--rdzv_conf token_file=" + file + " can be read by other users of this machine: chmod 600 " +
                      file);
  return token;
}

void set(RendezvousConf& conf, const std::string& key, const std::string& value, bool is_static) {
  const std::vector<std::string> both{"token",
                                      "token_file",
                                      "local_addr",
                                      "bind",
                                      "join_timeout",
                                      "close_timeout",
                                      "heartbeat_timeout",
                                      "keep_alive_interval",
                                      "keep_alive_max_attempt",
                                      "read_timeout",
                                      "timeout"};
  auto known = both;
  if (is_static) known.insert(known.end(), {"rank"});
  else known.insert(known.end(), {"last_call_timeout", "is_host", "store_type"});
  if (std::find(known.begin(), known.end(), key) == known.end()) {
    const auto nearest = nearest_name(key, known);
    std::string list;
    for (const auto& name : known) list += (list.empty() ? "" : ", ") + name;
    throw ConfigError("--rdzv_conf has the key '" + key + "'" + (nearest ? ", did you mean '" + *nearest + "'?" : "") +
                      " With --rdzv_backend " + (is_static ? "static" : "c10d") + " the keys are " + list);
  }
  if (key == "join_timeout" || key == "timeout") conf.join_timeout = time(key, value);
  else if (key == "last_call_timeout") conf.last_call_timeout = milliseconds(std::llround(number(key, value) * 1000));
  else if (key == "close_timeout") conf.close_timeout = time(key, value);
  else if (key == "heartbeat_timeout") conf.heartbeat_timeout = time(key, value);
  else if (key == "keep_alive_interval") conf.keep_alive_interval = time(key, value);
  else if (key == "keep_alive_max_attempt")
    conf.keep_alive_max_attempt = std::max<int64_t>(1, std::llround(number(key, value)));
  else if (key == "read_timeout") conf.read_timeout = time(key, value);
  else if (key == "is_host") conf.is_host = config::str_to_bool(value, "--rdzv_conf is_host");
  else if (key == "rank") conf.rank = std::llround(number(key, value));
  else if (key == "token") conf.token = value;
  else if (key == "token_file") conf.token = read_token(value);
  else if (key == "local_addr") conf.local_addr = value;
  else if (key == "bind") conf.bind = value;
  else if (value != "tcp")
    throw ConfigError("--rdzv_conf has store_type=" + value +
                      ", expected tcp: machines meet through a TCPStore here, not through a file");
}

}  // namespace

RendezvousConf parse_rendezvous_conf(const std::string& text, bool is_static) {
  RendezvousConf conf;
  if (is_static) conf.join_timeout = std::chrono::seconds(900);
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == entry.size())
      throw ConfigError("--rdzv_conf has '" + entry + "', expected key=value");
    set(conf, entry.substr(0, equals), entry.substr(equals + 1), is_static);
  }
  return conf;
}

Agent::Agent(const Job& job, Monitor* monitor) : monitor_(monitor) {
  std::error_code ignored;
  const std::string path = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / "accelerate-agent";
  if (::access(path.c_str(), X_OK) != 0)
    throw NotBuiltError(
        "several machines meet through the program " + path +
        ", which is not there. It is built and installed together with this one; was only this one copied?");
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw ResourceError(std::string("no socket can be opened: ") + std::strerror(errno) + ". See `ulimit -n`");
  Fd ours(ends[0]), its(ends[1]);
  char* const argv[] = {const_cast<char*>(path.c_str()), nullptr};
  pid_ = ::fork();
  if (pid_ < 0)
    throw ResourceError(std::string("no process can be started: ") + std::strerror(errno) + ". See `ulimit -u`");
  if (pid_ == 0) {
    // Ctrl-C and the like are for the launcher; the agent goes when its input ends.
    ::setpgid(0, 0);
    ::dup2(its.get(), STDIN_FILENO);
    ::dup2(its.get(), STDOUT_FILENO);
    ::execv(path.c_str(), argv);
    ::_exit(127);
  }
  socket_ = std::move(ours);
  const RendezvousConf& c = job.rendezvous;
  tell({{"backend", job.settings.text("rdzv_backend")},
        {"host", job.main_ip},
        {"port", job.main_port},
        {"machine_rank", job.machine_rank},
        {"min_machines", job.min_machines},
        {"max_machines", job.num_machines},
        {"max_restarts", job.options.max_restarts},
        {"local_world_size", job.local_world_size},
        {"role", job.options.role},
        {"run_id", job.run_id},
        {"join_timeout", c.join_timeout.count()},
        {"last_call_timeout", c.last_call_timeout.count()},
        {"close_timeout", c.close_timeout.count()},
        {"heartbeat_timeout", c.heartbeat_timeout.count()},
        {"keep_alive_interval", c.keep_alive_interval.count()},
        {"keep_alive_max_attempt", c.keep_alive_max_attempt},
        {"read_timeout", c.read_timeout.count()},
        {"is_host", c.is_host ? json(*c.is_host) : json()},
        {"token", c.token},
        {"local_addr", c.local_addr},
        {"bind", c.bind}});
}

Agent::~Agent() {
  ::shutdown(socket_.get(), SHUT_WR);
  while (read_some()) {
  }
  ::waitpid(pid_, nullptr, 0);
}

void Agent::tell(const json& message) {
  const std::string line = message.dump() + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t written = ::send(socket_.get(), line.data() + done, line.size() - done, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the agent is gone, which reading will say
    done += static_cast<size_t>(written);
  }
}

bool Agent::read_some() {
  char bytes[4096];
  ssize_t got;
  do got = ::read(socket_.get(), bytes, sizeof(bytes));
  while (got < 0 && errno == EINTR);
  if (got <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(got));
  return true;
}

std::optional<json> Agent::next() {
  const size_t end = buffer_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  auto event = json::parse(buffer_.substr(0, end));
  buffer_.erase(0, end + 1);
  return event;
}

json Agent::wait() {
  for (;;) {
    if (auto event = next()) return *event;
    if (monitor_) monitor_->serve_until(socket_.get());
    if (!read_some())
      return {{"event", "closed"},
              {"code", 71},
              {"why", "the program accelerate-agent, which keeps the connection to the other machines, has died"}};
  }
}

bool Agent::over(const json& event) {
  if (event.at("event") != "closed") return false;
  over_ = true;
  closed_ = {event.at("code"), event.at("why")};
  return true;
}

std::optional<Round> Agent::join() {
  if (over_) return std::nullopt;
  recalled_ = false;
  tell({{"say", "join"}});
  for (;;) {
    const json event = wait();
    if (over(event)) return std::nullopt;
    if (event.at("event") != "round") continue;
    return Round{event.at("number"),           event.at("restarts"),        event.at("group_rank"),
                 event.at("group_world_size"), event.at("first_rank"),      event.at("world_size"),
                 event.at("first_role_rank"),  event.at("role_world_size"), event.at("master_addr"),
                 event.at("master_port"),      event.at("run_id")};
  }
}

void Agent::failing() { tell({{"say", "failing"}}); }
void Agent::leave(const std::string& text) { tell({{"say", "leave"}, {"text", text}}); }

std::optional<std::string> Agent::recalled() {
  pollfd ready{socket_.get(), POLLIN, 0};
  json event;
  if (::poll(&ready, 1, 0) > 0 && !read_some()) event = wait();  // what is left of its words, then its death
  while (event.is_object() || !buffer_.empty()) {
    if (!event.is_object()) {
      auto line = next();
      if (!line) break;
      event = *line;
    }
    if ((over(event) || event.at("event") == "recall") && !recalled_)
      return recalled_ = true, event.at("why").get<std::string>();
    event = json();
  }
  return std::nullopt;
}

bool Agent::ended(const std::string& how, int64_t kind, int64_t code, const std::string& text) {
  if (over_) return false;
  tell({{"say", "ended"}, {"how", how}, {"kind", kind}, {"code", code}, {"text", text}});
  for (;;) {
    const json event = wait();
    if (over(event)) return false;
    if (event.at("event") == "again") return true;
  }
}

}  // namespace accelerate::launcher
