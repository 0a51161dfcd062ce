#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "utils/saved_exit_code.hpp"

namespace accelerate::launcher {

/// A machine's message about itself; it alone writes this.
struct Node {
  int64_t id = 0;             ///< from 1, in the order of arrival; a machine that comes back has a new one
  std::string host, address;  ///< its name, and how the others reach it
  int64_t local_world_size = 1;
  std::string role = "default";
  int64_t machine_rank = -1;  ///< --machine_rank, which counts with fixed ranks
  int64_t round = 0;          ///< the last one that it took part in
  /// joining -> running -> (failing ->) failed, stopped or done -> joining ...; left is the end.
  std::string state = "joining";
  int64_t beat = 0;  ///< grows as long as it lives
  // With failed: who and why.
  int64_t kind = 1;  ///< the least of several failures is the likeliest cause (see blame_kind())
  int64_t code = 1;  ///< exit code of the rank that failed first; with left, of its launcher
  std::string text;
};
inline constexpr int64_t kGoneCode = 69;  ///< of a job that has lost a machine
/// The job's exit code because of a machine that has left: that of ranks that have saved, if its own have.
inline int64_t code_of_leaver(const Node& node) { return node.code == kSavedExitCode ? kSavedExitCode : kGoneCode; }
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Node, id, host, address, local_world_size, role, machine_rank, round, state, beat,
                                   kind, code, text)

/// A machine's place in a round.
struct MachineMember {
  int64_t id = 0;
  int64_t first_rank = 0, local_world_size = 1;
  int64_t first_role_rank = 0, role_world_size = 1;  ///< among the machines of the same --role
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MachineMember, id, first_rank, local_world_size, first_role_rank, role_world_size)

/// The state that holds for all machines; the coordinator alone writes this.
struct Decision {
  std::string phase = "forming";       ///< forming -> running -> ending -> forming ...; closed is the end
  int64_t round = 0;                   ///< the one that runs or ends, or the last one
  int64_t restarts = 0;                ///< how many failures were answered by starting again
  std::vector<MachineMember> members;  ///< of the round; the index is the group rank
  int64_t world_size = 0;
  std::string why;   ///< of ending and closed, for people
  int64_t code = 0;  ///< of closed: what all launchers return
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Decision, phase, round, restarts, members, world_size, why, code)

/// Decides who takes part in which round. It runs in the agent that hosts the store, so that one clock measures
/// everybody's silence; it knows neither stores nor processes, so that tests can invent both.
class Coordinator {
 public:
  using Clock = std::chrono::steady_clock;
  struct Settings {
    int64_t min_machines = 1, max_machines = 1, max_restarts = 0;
    bool fixed_ranks = false;  ///< group ranks are the machines' --machine_rank
    std::chrono::milliseconds join_timeout{600000};
    std::chrono::milliseconds last_call{30000};   ///< in the first round: how long the least number waits for more
    std::chrono::milliseconds lost_after{15000};  ///< silence after which a machine is taken for lost
  };
  Coordinator(const Settings& settings, Clock::time_point now) : settings_(settings), forming_since_(now) {}

  /// Looks at all machines that ever came, and decides what can be decided.
  /// @return whether the decision changed.
  bool step(const std::vector<Node>& nodes, Clock::time_point now);
  const Decision& decision() const { return decision_; }
  /// The host is going: everybody must.
  void close(int64_t code, const std::string& why);
  /// Machines that live and have not yet heard that the job is over.
  int64_t waiting(const std::vector<Node>& nodes, Clock::time_point now);

 private:
  struct Life {
    int64_t beat = -1;
    Clock::time_point at{};
  };
  bool lives(const Node& node, Clock::time_point now);
  void form(const std::vector<Node>& nodes, Clock::time_point now);
  void watch(const std::vector<Node>& nodes, Clock::time_point now);
  void end(const std::vector<Node>& nodes, Clock::time_point now);
  void start(const std::vector<const Node*>& machines);
  std::string missing(const std::vector<const Node*>& candidates) const;

  Settings settings_;
  Decision decision_;
  Clock::time_point forming_since_, enough_since_{};
  bool enough_ = false;
  int64_t first_failing_ = 0;
  bool joined_ = false;  ///< the round ends for a machine that has come
  std::map<int64_t, Life> lives_;
};

}  // namespace accelerate::launcher
