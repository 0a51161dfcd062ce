#include "launch/machines/agent.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "launch/job/job.hpp"
#include "launch/monitor/monitor.hpp"
#include "utils/raise.hpp"

namespace accelerate::launcher {

using nlohmann::json;

Agent::Agent(const Job& job, Monitor* monitor) : monitor_(monitor) {
  const std::string path = program_beside_this("accelerate-agent", "several machines meet through");
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    raise<ResourceError>("no socket can be opened: {}. See `ulimit -n`", std::strerror(errno));
  Fd ours(ends[0]), its(ends[1]);
  char* const argv[] = {const_cast<char*>(path.c_str()), nullptr};
  pid_ = ::fork();
  if (pid_ < 0) raise_no_process();
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
        {"max_restarts", job.max_restarts},
        {"local_world_size", job.local_world_size},
        {"role", job.settings.text("role")},
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
  ssize_t got = 0;
  do got = ::read(socket_.get(), bytes, sizeof(bytes));
  while (got < 0 && errno == EINTR);
  if (got <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(got));
  return true;
}

std::optional<AgentEvent> Agent::next() {
  const size_t end = buffer_.find('\n');
  if (end == std::string::npos) return std::nullopt;
  const auto line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return parse_event(line);
}

AgentEvent Agent::wait() {
  for (;;) {
    if (auto event = next()) return *event;
    if (monitor_) monitor_->serve_until(socket_.get());
    if (!read_some())
      return {.kind = AgentEvent::Kind::closed,
              .round = {},
              .code = 71,
              .why = "the program accelerate-agent, which keeps the connection to the other machines, has died"};
  }
}

bool Agent::over(const AgentEvent& event) {
  if (event.kind != AgentEvent::Kind::closed) return false;
  over_ = true;
  closed_ = {event.code, event.why};
  return true;
}

std::optional<Round> Agent::join() {
  if (over_) return std::nullopt;
  recalled_ = false;
  tell({{"say", "join"}});
  for (;;) {
    const auto event = wait();
    if (over(event)) return std::nullopt;
    if (event.kind == AgentEvent::Kind::round) return event.round;
  }
}

void Agent::failing() { tell({{"say", "failing"}}); }
void Agent::leave(const std::string& text, int64_t code) { tell({{"say", "leave"}, {"text", text}, {"code", code}}); }

std::optional<std::string> Agent::recalled() {
  pollfd ready{socket_.get(), POLLIN, 0};
  std::optional<AgentEvent> event;
  if (::poll(&ready, 1, 0) > 0 && !read_some()) event = wait();  // what is left of its words, then its death
  if (!event) event = next();
  for (; event; event = next())
    if ((over(*event) || event->kind == AgentEvent::Kind::recall) && !recalled_) return recalled_ = true, event->why;
  return std::nullopt;
}

bool Agent::ended(const std::string& how, int64_t kind, int64_t code, const std::string& text) {
  if (over_) return false;
  tell({{"say", "ended"}, {"how", how}, {"kind", kind}, {"code", code}, {"text", text}});
  for (;;) {
    const auto event = wait();
    if (over(event)) return false;
    if (event.kind == AgentEvent::Kind::again) return true;
  }
}

}  // namespace accelerate::launcher
