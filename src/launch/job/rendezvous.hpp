#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::launcher {

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
  /// c10d: whether this machine serves the store; unset: if the address is this machine's and the port is free.
  std::optional<bool> is_host;
  std::optional<int64_t> rank;  ///< static: instead of --machine_rank
  std::string token;            ///< the shared secret, itself or from token_file
  std::string local_addr;  ///< how the others reach this machine; empty: the address from which it reaches the host
  std::string bind;        ///< on which address the host listens; empty: on --main_process_ip's
  std::vector<std::string> unused;  ///< keys without effect, a remark each
};

/// Torchrun's own words for settings that have flags here; they count where the flag's setting is not given.
constexpr std::pair<const char*, const char*> kTorchrunKeys[] = {{"rdzv_backend", "rdzv_backend"},
                                                                 {"node_rank", "machine_rank"},
                                                                 {"max_restarts", "max_restarts"},
                                                                 {"monitor_interval", "monitor_interval"}};
constexpr const char* kEndpointKey = "rdzv_endpoint";

/// The entries of such a text in their order. @throws ConfigError where one is not key=value
std::vector<std::pair<std::string, std::string>> rendezvous_entries(const std::string& text);

/// @throws ConfigError for values that can't be.
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

}  // namespace accelerate::launcher
