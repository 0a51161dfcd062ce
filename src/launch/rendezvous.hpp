#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "launch/process.hpp"

namespace accelerate::launcher {

struct Job;
class Monitor;

/// --rdzv_conf, read. Times are seconds there, whole or not.
struct RendezvousConf {
  using ms = std::chrono::milliseconds;
  ms join_timeout{600000};       ///< for the machines to come together (`timeout`, 900 s, with static)
  ms last_call_timeout{30000};   ///< elastic: how long the least number of machines waits for more, in the first round
  ms close_timeout{30000};       ///< at the end: how long the host waits for the others to hear of it
  ms heartbeat_timeout{5000};    ///< one exchange with the store while ranks run; longer means that the host is lost
  ms keep_alive_interval{5000};  ///< between two signs of life
  int64_t keep_alive_max_attempt = 3;  ///< a machine that misses so many is taken for lost
  ms read_timeout{60000};              ///< one exchange with the store otherwise
  std::optional<bool> is_host;         ///< c10d: whether this machine serves the store; unset: if the address is this
                                       ///< machine's and the port is free
  std::optional<int64_t> rank;         ///< static: instead of --machine_rank
  std::string token;                   ///< the shared secret, itself or from token_file
  std::string local_addr;  ///< how the others reach this machine; empty: the address from which it reaches the host
  std::string bind;        ///< on which address the host listens; empty: on --main_process_ip's
};

/// @throws ConfigError for keys that are not known (naming the nearest) and values that can't be.
RendezvousConf parse_rendezvous_conf(const std::string& text, bool is_static);

/// This machine's place in a round of a job on several machines; what ranks find in their environment.
struct Round {
  int64_t number = 1;
  int64_t restarts = 0;  ///< failures of the whole job so far
  int64_t group_rank = 0, group_world_size = 1;
  int64_t first_rank = 0, world_size = 1;
  int64_t first_role_rank = 0, role_world_size = 1;
  std::string master_addr;  ///< of the store that an agent serves for the ranks
  int64_t master_port = 0;
  std::string run_id;  ///< the same on all machines
};

/// The program beside the launcher that speaks with the other machines, on c10d's TCPStore: `accelerate-agent`.
///
/// Lines of JSON go to its standard input and come from its standard output, which are one socket. It ends when the
/// launcher does, which it notices by the end of its input.
class Agent {
 public:
  /// Starts it. @throws NotBuiltError when it does not lie beside this program.
  /// @param monitor  goes on serving its page while the launcher waits here; may be null
  explicit Agent(const Job& job, Monitor* monitor = nullptr);
  ~Agent();  ///< waits until it has said goodbye to the others
  Agent(const Agent&) = delete;

  /// Waits for the next round. @return nothing: the job is over, see closed().
  std::optional<Round> join();
  /// A rank failed here: the other machines may stop theirs.
  void failing();
  /// All ranks here have ended. @param kind  see blame_kind()
  /// @return whether to join() again; false: the job is over.
  bool ended(const std::string& how, int64_t kind, int64_t code, const std::string& text);
  /// This machine leaves the job.
  void leave(const std::string& text);

  /// To poll while ranks run.
  int fd() const { return socket_.get(); }
  /// Reads what is there. @return why the ranks are to be stopped, once.
  std::optional<std::string> recalled();

  struct Closed {
    int64_t code = 0;
    std::string why;
  };
  const Closed& closed() const { return closed_; }

 private:
  void tell(const nlohmann::json& message);
  bool read_some();                        ///< false at the end
  std::optional<nlohmann::json> next();    ///< a whole line that was read
  nlohmann::json wait();                   ///< for a line; the agent's death is an event as well
  bool over(const nlohmann::json& event);  ///< the job has ended; remembers how

  Monitor* const monitor_;
  pid_t pid_ = -1;
  Fd socket_;
  std::string buffer_;
  bool recalled_ = false, over_ = false;
  Closed closed_;
};

}  // namespace accelerate::launcher
