// accelerate-agent: what `accelerate launch` starts beside itself when several machines take part. It speaks with the
// other machines' agents through c10d's TCPStore, and with its launcher by lines of JSON (see
// src/launch/rendezvous.hpp). One of the agents hosts the store and decides (see coordinator.hpp).
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "agent/address.hpp"
#include "agent/tunnel.hpp"
#include "input/json.hpp"
#include "launch/machines/messages.hpp"
#include "memory/loading_pages.hpp"
#include "utils/program_help.hpp"
#include "utils/raise.hpp"

namespace accelerate::agent {
namespace {

using launcher::Coordinator;
using launcher::Decision;
using launcher::MachineMember;
using launcher::Node;
using nlohmann::json;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
std::atomic<bool> entered = false;  // the others know of this machine
using Store = c10::intrusive_ptr<c10d::TCPStore>;

const std::string kOurs = "accelerate.agent/";  // keys of other names are the ranks'
constexpr milliseconds kBusyTick{20}, kIdleTick{100};

struct Options {
  std::string backend, host, role, run_id, token, local_addr, bind;
  int64_t port = 0, machine_rank = 0, min_machines = 1, max_machines = 1, max_restarts = 0, local_world_size = 1,
          keep_alive_max_attempt = 3;
  milliseconds join_timeout{}, last_call_timeout{}, close_timeout{}, heartbeat_timeout{}, keep_alive_interval{},
      read_timeout{};
  std::optional<bool> is_host;
  bool is_static() const { return backend == "static"; }
  std::string where() const { return host + ":" + std::to_string(port); }
};

Options options_of(const json& j) {
  const auto time = [&](const char* key) { return milliseconds(j.at(key).get<int64_t>()); };
  Options o{j.at("backend"),
            j.at("host"),
            j.at("role"),
            j.at("run_id"),
            j.at("token"),
            j.at("local_addr"),
            j.at("bind"),
            j.at("port"),
            j.at("machine_rank"),
            j.at("min_machines"),
            j.at("max_machines"),
            j.at("max_restarts"),
            j.at("local_world_size"),
            j.at("keep_alive_max_attempt"),
            time("join_timeout"),
            time("last_call_timeout"),
            time("close_timeout"),
            time("heartbeat_timeout"),
            time("keep_alive_interval"),
            time("read_timeout"),
            std::nullopt};
  if (!j.at("is_host").is_null()) o.is_host = j.at("is_host").get<bool>();
  return o;
}

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// The options that must be equal on all machines.
json contract(const Options& o) {
  return {
      {"accelerate", 1}, {"backend", o.backend}, {"min_machines", o.min_machines}, {"max_machines", o.max_machines}};
}

/// Behind the gate.
Store serve(Gate& gate, milliseconds timeout) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(gate.store().port());
  tcp.isServer = true;
  tcp.waitWorkers = false;
  tcp.timeout = timeout;
  tcp.masterListenFd = gate.store().listening();
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", tcp);
}

Store connect(const std::string& host, int64_t port, milliseconds timeout) {
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(port);
  tcp.waitWorkers = false;
  tcp.timeout = timeout;
  return c10::make_intrusive<c10d::TCPStore>(host, tcp);
}

/// Something that answers on the port but speaks another protocol could keep c10d's client waiting for ever.
class Deadline {
 public:
  Deadline(milliseconds time, std::function<void()> late)
      : thread_([this, time, late = std::move(late)](const std::stop_token& stop) {
          std::unique_lock lock(mutex_);
          if (!wake_.wait_for(lock, stop, time, [] { return false; }) && !stop.stop_requested()) late();
        }) {}

 private:
  std::mutex mutex_;  // guards nothing: a waiting thread must hold one
  std::condition_variable_any wake_;
  std::jthread thread_;
};

void tell(const json& event) {
  const std::string line = event.dump() + "\n";
  for (size_t done = 0; done < line.size();) {
    const ssize_t written = ::write(STDOUT_FILENO, line.data() + done, line.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;  // the launcher is gone, which reading will say
    done += static_cast<size_t>(written);
  }
}

class MachineAgent {
 public:
  explicit MachineAgent(Options options) : o_(std::move(options)) {}

  void run() {
    open();
    me_.host = host_name();
    me_.address = o_.local_addr.empty() ? address_towards(o_.host, o_.port) : o_.local_addr;
    me_.local_world_size = o_.local_world_size;
    me_.role = o_.role;
    me_.machine_rank = o_.machine_rank;
    me_.id = store_->add(kOurs + "machines", 1);
    write();
    entered = true;
    give_loading_pages_back();
    while (turn()) {
    }
    if (coordinator_) say_goodbye();
  }

 private:
  bool is_host() const { return coordinator_.has_value(); }

  // ---- meeting

  void open() {
    const bool inferred = !o_.is_static() && !o_.is_host;
    const bool host = o_.is_static() ? o_.machine_rank == 0 : o_.is_host.value_or(is_own_address(o_.host));
    if (!host || !host_store(inferred)) reach_store();
    store_->setTimeout(o_.read_timeout);
    if (is_host()) {
      store_->set(kOurs + "contract", bytes(contract(o_).dump()));
      publish();
      return;
    }
    std::string theirs;
    try {
      theirs = text(store_->get(kOurs + "contract"));
    } catch (const std::exception&) {
      raise<LaunchError>(
          "the TCPStore at {} is not one where machines meet: another job's ranks probably use this port. Choose "
          "another --main_process_port",
          o_.where());
    }
    if (theirs != contract(o_).dump())
      raise<ConfigError>(
          "the machines were started with different options: {} where the host is, {} here. --num_machines and "
          "--rdzv_backend must be the same everywhere",
          theirs, contract(o_).dump());
  }

  /// @return false if another process of this machine has the port already, and nobody said that it must be this one.
  bool host_store(bool inferred) {
    const std::string listen = o_.bind.empty() ? o_.host : o_.bind;
    int64_t port = o_.port;
    const int fd = listen_at(listen, port);
    if (fd == -EADDRINUSE && inferred) return false;
    if (fd < 0) {
      const std::string why = std::strerror(-fd);
      if (fd == -EADDRINUSE)
        raise<LaunchError>(
            "the port {}, where the machines are to meet, is already in use on this machine, probably by another "
            "training run. Choose another --main_process_port, the same on all machines",
            o_.where());
      raise<LaunchError>("this machine is to host the rendezvous and can't listen at {}:{}: {}{}", listen, o_.port, why,
                         fd == -EADDRNOTAVAIL
                             ? ". It is not an address of this machine: correct --main_process_ip, or name the address "
                               "to listen on with --rdzv_conf bind=ADDRESS (0.0.0.0 is all)"
                             : "");
    }
    gate_ = std::make_unique<Gate>(fd, o_.token);
    store_ = serve(*gate_, o_.read_timeout);
    coordinator_.emplace(
        Coordinator::Settings{o_.min_machines, o_.max_machines, o_.max_restarts, o_.is_static(), o_.join_timeout,
                              o_.last_call_timeout, o_.keep_alive_interval * o_.keep_alive_max_attempt},
        Clock::now());
    return true;
  }

  void reach_store() {
    if (o_.token.empty()) wait_for_port(o_.host, o_.port, o_.join_timeout);
    else door_ = std::make_unique<Door>(o_.host, o_.port, o_.token, o_.join_timeout);
    const auto patience = std::min(o_.read_timeout, o_.join_timeout);
    const Deadline deadline(patience + std::chrono::seconds(2), [this] {
      tell({{"event", "closed"},
            {"code", 71},
            {"why", "something answers at " + o_.where() +
                        ", but it does not speak as the host of a rendezvous. Does it expect a token, or is "
                        "--main_process_port another program's?"}});
      ::_exit(71);
    });
    try {
      store_ = door_ ? connect("127.0.0.1", door_->port(), patience) : connect(o_.host, o_.port, patience);
    } catch (const std::exception& error) {
      const std::string first = std::string(error.what()).substr(0, std::string(error.what()).find('\n'));
      raise<LaunchError>(
          "what answers at {} does not speak as the host of a rendezvous. Does it expect a token, or is "
          "--main_process_port another program's? ({})",
          o_.where(), first);
    }
  }

  // ---- turns

  bool turn() {
    const bool busy = is_host() ? decision_.phase != "running" || (me_.state != "running" && me_.state != "done")
                                : me_.state != "running" && me_.state != "done";
    pollfd in{STDIN_FILENO, POLLIN, 0};
    if (::poll(&in, 1, static_cast<int>((busy ? kBusyTick : kIdleTick).count())) > 0 && !listen()) {
      if (me_.state != "left") leave("", launcher::kGoneCode);
      return false;
    }
    if (me_.state == "left") return true;  // the launcher ends in a moment
    if (Clock::now() >= next_beat_) write();
    if (is_host()) coordinate();
    else decision_ = launcher::parse_decision(text(store_->get(kOurs + "decision")));
    follow();
    return true;
  }

  /// The launcher's words. @return false when it is gone.
  bool listen() {
    char more[4096];
    const ssize_t got = ::read(STDIN_FILENO, more, sizeof(more));
    if (got < 0 && errno == EINTR) return true;
    if (got <= 0) return false;
    input_.append(more, static_cast<size_t>(got));
    for (size_t end; (end = input_.find('\n')) != std::string::npos; input_.erase(0, end + 1))
      hear(accelerate::parse_json<json>(input_.substr(0, end)));
    return true;
  }

  void hear(const json& message) {
    const std::string say = message.at("say");
    if (say == "join") {
      me_.state = "joining";
      joining_since_ = Clock::now();
    } else if (say == "failing") {
      me_.state = "failing";
    } else if (say == "leave") {
      return leave(message.at("text"), message.at("code"));
    } else {
      me_.state = message.at("how");
      me_.kind = message.at("kind");
      me_.code = message.at("code");
      me_.text = message.at("text");
    }
    write();
  }

  void leave(const std::string& why, int64_t code) {
    me_.state = "left";
    me_.text = why;
    me_.code = code;
    write();
  }

  void write() {
    ++me_.beat;
    next_beat_ = Clock::now() + o_.keep_alive_interval;
    store_->setTimeout(me_.state == "running" ? o_.heartbeat_timeout : o_.read_timeout);
    store_->set(kOurs + "machine/" + std::to_string(me_.id), bytes(json(me_).dump()));
  }

  /// Acts on the decision, as far as it concerns this machine.
  void follow() {
    if (decision_.phase == "closed") {
      if (!std::exchange(told_closed_, true))
        tell({{"event", "closed"}, {"code", decision_.code}, {"why", decision_.why}});
      return;
    }
    const bool ended = me_.state == "failed" || me_.state == "stopped" || me_.state == "done";
    const bool present = me_.state == "running" || me_.state == "failing";
    if (me_.state == "joining" && decision_.phase == "running" && decision_.round > me_.round) return enter();
    if (present && (decision_.phase != "running" || decision_.round != me_.round)) {
      if (told_recall_ != me_.round)
        tell({{"event", "recall"},
              {"why", decision_.round == me_.round ? decision_.why : "the others took this machine for lost"}});
      told_recall_ = me_.round;
    } else if (ended && (decision_.phase == "forming" || decision_.round > me_.round)) {
      if (told_again_ != me_.round) tell({{"event", "again"}});
      told_again_ = me_.round;
    } else if (me_.state == "joining" && joining_since_ && decision_.phase == "forming" &&
               Clock::now() - *joining_since_ > o_.join_timeout + std::chrono::seconds(1)) {
      raise<LaunchError>("not enough machines came within {} s (join_timeout in --rdzv_conf)",
                         o_.join_timeout.count() / 1000);
    }
  }

  void enter() {
    for (size_t i = 0; i < decision_.members.size(); ++i) {
      const MachineMember& member = decision_.members[i];
      if (member.id != me_.id) continue;
      const auto [address, port] = ranks_store(i == 0);
      me_.round = decision_.round;
      me_.state = "running";
      write();
      return tell({{"event", "round"},
                   {"number", decision_.round},
                   {"restarts", decision_.restarts},
                   {"group_rank", i},
                   {"group_world_size", decision_.members.size()},
                   {"first_rank", member.first_rank},
                   {"world_size", decision_.world_size},
                   {"first_role_rank", member.first_role_rank},
                   {"role_world_size", member.role_world_size},
                   {"master_addr", address},
                   {"master_port", port},
                   {"run_id", text(store_->get(kOurs + "run_id"))}});
    }
    if (o_.is_static() && joining_since_ && Clock::now() - *joining_since_ > o_.join_timeout)
      raise<ConfigError>("machine rank {} is taken: another machine was started with the same --machine_rank",
                         o_.machine_rank);
  }

  bool shares_store() const { return o_.is_static() && o_.token.empty(); }

  /// Ranks of a new round must not read what those of the round before, which have all ended, left in the store.
  void forget_ranks() {
    for (const auto& key : store_->listKeys())
      if (key.find(kOurs) == std::string::npos) store_->deleteKey(key.starts_with("/") ? key.substr(1) : key);
  }

  /// The store where the ranks of this round meet, which the agent of group rank 0 serves. With static and no token it
  /// is the one where the agents meet, so that --main_process_port is the only port that must be open.
  std::pair<std::string, int64_t> ranks_store(bool first) {
    if (shares_store()) return {o_.host, o_.port};
    const std::string key = kOurs + "store/" + std::to_string(decision_.round);
    if (first) {
      int64_t port = 0;
      const int fd = listen_at(me_.address, port);
      if (fd < 0)
        raise<LaunchError>(
            "no port can be opened on {}, where the others would reach this machine: {}. Name an address of this "
            "machine with --rdzv_conf local_addr=ADDRESS",
            me_.address, std::strerror(-fd));
      ranks_store_.reset();  // of the round before
      ranks_gate_ = std::make_unique<Gate>(fd, "");
      ranks_store_ = serve(*ranks_gate_, o_.read_timeout);
      store_->set(key, bytes(json{{"address", me_.address}, {"port", port}}.dump()));
    }
    store_->setTimeout(o_.read_timeout);
    return launcher::parse_place(text(store_->get(key)));
  }

  // ---- the host's part

  void coordinate() {
    if (coordinator_->step(read_machines(), Clock::now())) {
      if (coordinator_->decision().phase == "running" && shares_store()) forget_ranks();
      publish();
    }
    decision_ = coordinator_->decision();
  }

  std::vector<Node> read_machines() {
    const int64_t count = store_->add(kOurs + "machines", 0);
    std::vector<std::string> keys;
    std::vector<int64_t> ids;
    for (int64_t id = 1; id <= count; ++id) {
      const std::string key = kOurs + "machine/" + std::to_string(id);
      if (static_cast<size_t>(id) > seen_.size()) seen_.push_back(false);
      // A machine takes its number a moment before it says who it is.
      if (!seen_[static_cast<size_t>(id - 1)]) seen_[static_cast<size_t>(id - 1)] = store_->check({key});
      if (seen_[static_cast<size_t>(id - 1)]) keys.push_back(key), ids.push_back(id);
    }
    std::vector<Node> machines;
    if (keys.empty()) return machines;
    const auto values = store_->multiGet(keys);
    for (size_t i = 0; i < ids.size(); ++i) machines.push_back(launcher::parse_node(text(values.at(i)), ids[i]));
    return machines;
  }

  void publish() {
    if (coordinator_->decision().round == 0) store_->set(kOurs + "run_id", bytes(o_.run_id));
    store_->set(kOurs + "decision", bytes(json(coordinator_->decision()).dump()));
  }

  /// The store ends with this process: the others must have heard the end of the job before.
  void say_goodbye() {
    coordinator_->close(code_of_leaver(me_), "the machine that hosts the rendezvous (" + me_.host + ", " + me_.address +
                                                 ") has left" + (me_.text.empty() ? "" : ": " + me_.text));
    publish();
    for (const auto end = Clock::now() + o_.close_timeout;
         Clock::now() < end && coordinator_->waiting(read_machines(), Clock::now()) > 0;)
      std::this_thread::sleep_for(kBusyTick);
  }

  const Options o_;
  Node me_;
  Decision decision_;
  std::optional<Clock::time_point> joining_since_;
  Clock::time_point next_beat_{};
  std::string input_;
  int64_t told_recall_ = 0, told_again_ = 0;
  bool told_closed_ = false;
  std::vector<bool> seen_;
  std::optional<Coordinator> coordinator_;
  std::unique_ptr<Gate> gate_, ranks_gate_;
  std::unique_ptr<Door> door_;
  Store store_, ranks_store_;
};

int main_program() {
  // Other output of this process to stdout must not get between the lines for the launcher; and nothing kills it but
  // the end of its input.
  ::signal(SIGPIPE, SIG_IGN);
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 0);
  std::string line;
  for (char c; ::read(STDIN_FILENO, &c, 1) == 1 && c != '\n';) line += c;
  if (line.empty())
    return std::fprintf(
               stderr,
               "accelerate-agent is started by `accelerate launch` when several machines take part (--num_machines)\n"),
           64;
  const auto closed = [](int code, const std::string& why) {
    return tell({{"event", "closed"}, {"code", code}, {"why", why}}), code;
  };
  try {
    const Options options = options_of(accelerate::parse_json<json>(line));
    // Whatever the main thread waits for when the launcher goes, it does not outlive it by more than a goodbye.
    std::thread([patience = options.close_timeout + std::chrono::seconds(2), joined = &entered] {
      pollfd gone{STDIN_FILENO, POLLRDHUP, 0};
      while (::poll(&gone, 1, -1) < 0) {
      }
      if (*joined) std::this_thread::sleep_for(patience);
      ::_exit(0);
    }).detach();
    MachineAgent(options).run();
    return 0;
  } catch (const Error& error) {
    return closed(error.exit_code(), error.what());
  } catch (const std::exception& error) {
    // c10d's exceptions have no kinds: by now the store was there, so it has gone.
    return closed(69, std::string("the machine that hosts the rendezvous can't be reached any more: ") +
                          std::string(error.what()).substr(0, std::string(error.what()).find('\n')));
  }
}

}  // namespace
}  // namespace accelerate::agent

int main(int argc, char** argv) {
  command::say_part_of_if_asked(argc, argv, "accelerate-agent meets the agents of other machines.");
  return accelerate::agent::main_program();
}
