#pragma once

#include <sys/types.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "launch/job/rendezvous.hpp"
#include "launch/machines/messages.hpp"
#include "launch/supervise/peers.hpp"
#include "launch/system/process.hpp"

namespace accelerate::launcher {

struct Job;
class Monitor;

/// The program beside the launcher that speaks with the other machines, on c10d's TCPStore: `accelerate-agent`.
///
/// Lines of JSON go to its standard input and come from its standard output, which are one socket. It ends when the
/// launcher does, which it notices by the end of its input.
class Agent : public Peers {
 public:
  /// Starts it. @throws NotBuiltError when it does not lie beside this program.
  /// @param monitor  goes on serving its page while the launcher waits here; may be null
  explicit Agent(const Job& job, Monitor* monitor = nullptr);
  ~Agent() override;  ///< waits until it has said goodbye to the others
  Agent(const Agent&) = delete;

  /// Waits for the next round. @return nothing: the job is over, see closed().
  std::optional<Round> join();
  /// All ranks here have ended. @param kind  see blame_kind()
  /// @return whether to join() again; false: the job is over.
  bool ended(const std::string& how, int64_t kind, int64_t code, const std::string& text);
  /// This machine leaves the job. @param code  that its launcher returns
  void leave(const std::string& text, int64_t code);

  int fd() const override { return socket_.get(); }
  std::optional<std::string> recalled() override;
  void failing() override;

  struct Closed {
    int64_t code = 0;
    std::string why;
  };
  const Closed& closed() const { return closed_; }

 private:
  void tell(const nlohmann::json& message);
  bool read_some();                    ///< false at the end
  std::optional<AgentEvent> next();    ///< a whole line that was read
  AgentEvent wait();                   ///< for a line; the agent's death is an event as well
  bool over(const AgentEvent& event);  ///< the job has ended; remembers how

  Monitor* const monitor_;
  pid_t pid_ = -1;
  Fd socket_;
  std::string buffer_;
  bool recalled_ = false, over_ = false;
  Closed closed_;
};

}  // namespace accelerate::launcher
