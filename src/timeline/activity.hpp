#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "timeline/spans.hpp"
#include "timeline/trace_file.hpp"

/// The times of a rank's activities, from the events of its trace.
namespace accelerate::timeline {

/// A thread's occupation, by the innermost event that tells it.
enum class Doing : uint8_t {
  nothing,        ///< nothing that was recorded: the program's own code, or waiting for something without a name
  compute,        ///< an operator
  communication,  ///< it starts, waits for or carries out an exchange with other ranks
  data,           ///< it waits for the loader
  weights,        ///< it waits for weights from host memory or files, or sends them there
  checkpoint,     ///< it writes or reads one
};

/// Communication of one kind.
struct Exchange {
  std::string kind;  ///< "unit_gather", "gradient_reduce", "comm_wait", "all_reduce", …
  int64_t count = 0;
  int64_t bytes = 0;
  Spans while_it_lasts, exposed;
};

struct Operator {
  std::string name;
  int64_t count = 0;
  int64_t self = 0;  ///< nanoseconds, without the operators within
};

/// The activity of one rank. All moments are nanoseconds since TraceHead::base on the rank's own clock.
struct Activity {
  TimeSpan recorded;  ///< from the first event to the end of the last
  /// These five have nothing in common: what computes is not exposed, and so on in this order.
  Spans compute, exposed, data, weights, checkpoint;
  /// Exchanges that are under way, whatever else happens meanwhile.
  Spans communication;
  std::vector<Exchange> exchanges;                   ///< the longest first
  std::vector<Operator> operators;                   ///< likewise; of the threads that train, or kernels
  std::unordered_map<std::string, int64_t> fetches;  ///< of units from where they are otherwise, by unit
  std::vector<TraceStep> steps;                      ///< as events tell them, where the head does not
  std::set<int64_t> devices;                         ///< the processes in the trace that stand for them
  bool on_device = false;                            ///< there are kernels: they compute, not the threads
  bool knows_waits = false;                          ///< there are scopes of ours in which threads wait
};

/// Whether it happens on a device, whose number is the process and whose streams are the threads.
bool is_of_device(std::string_view category);

/// Collects events, and makes of them what the rank did. It keeps some 32 bytes of an event.
class ActivityReader {
 public:
  void add(const nlohmann::json& event);
  /// Once, after the last event.
  Activity finish();

 private:
  /// The meaning of events of one category and name.
  struct Label {
    std::string name;
    Doing doing = Doing::nothing;
    std::string kind;     ///< of ours, or of an exchange
    std::string subject;  ///< of ours
    int64_t bytes = 0;
    bool on_device = false, apart = false;  ///< apart: it began and ended on different threads
  };
  struct Event {
    int64_t begin, end;
    uint32_t label;
  };
  struct Thread {
    std::vector<Event> events;
    bool trains = false;
  };
  /// A thread's time in pieces, each with the label that says what it does.
  struct Piece {
    TimeSpan span;
    Doing doing;
    uint32_t label;
  };

  void take(const Lasting& event, std::pair<int64_t, int64_t> thread);
  static Label label_of(const std::string& category, const std::string& name);
  uint32_t number_of(const std::string& category, const std::string& name);
  void resolve_waits();
  std::vector<Piece> pieces_of(Thread& thread, std::vector<Operator>& operators) const;

  std::vector<Label> labels_;
  std::unordered_map<std::string, uint32_t> numbers_;
  std::map<std::pair<int64_t, int64_t>, Thread> threads_;  ///< by process and thread
  std::vector<Event> apart_;                               ///< exchanges that no thread is in
  std::vector<Event> kernels_;                             ///< of devices
  std::vector<TraceStep> profiler_steps_, own_steps_;
  std::set<int64_t> devices_;
  TimeSpan recorded_{INT64_MAX, INT64_MIN};
};

}  // namespace accelerate::timeline
