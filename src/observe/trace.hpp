#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "utils/trace_kinds.hpp"

/// The work of this library while somebody profiles: spans of time with a subject and bytes, which the profiler puts
/// beside LibTorch's own events (docs/formats/profile_trace.md). They are not RecordFunctions: those know their names
/// before the bytes are known, and LibTorch keeps them of few threads. While nobody records a span costs one relaxed
/// load and makes no string. Any thread.
namespace accelerate::trace {

/// The lane in which a span is shown.
enum class Lane : uint8_t {
  thread,         ///< that of the thread that made it, and ends it
  communication,  ///< beside all threads: under way while they go on
};

struct Event {
  std::string name;                  ///< "accelerate::<kind> <subject> bytes=<n>", or the operator's
  int64_t begin_ns = 0, end_ns = 0;  ///< since 1970
  uint64_t thread = 0;               ///< as LibTorch numbers them
  int64_t system_thread = 0;
  Lane lane = Lane::thread;
  bool is_operator = false;  ///< of a thread that LibTorch's profiler does not see
};
struct Step {
  int64_t number = 0;
  int64_t begin_ns = 0, end_ns = 0;
};
struct Recording {
  std::vector<Event> events;  ///< in the order of their ends
  std::vector<Step> steps;
};

/// Keeps what ends while it lives, of the whole process. Several at a time keep the same.
class Recorder {
 public:
  Recorder();
  ~Recorder();
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  /// Once. Spans that have not ended are left out.
  Recording stop();

 private:
  friend class Span;
  friend void add_operator(std::string name, uint64_t begin);
  friend void step_done(int64_t number, const void* optimizer);
  struct Impl;
  static void add(const Event& event, uint64_t begin, uint64_t end);
  std::unique_ptr<Impl> impl_;
};

namespace detail {
extern std::atomic<int> recorders;
}
inline bool recording() { return detail::recorders.load(std::memory_order_relaxed) > 0; }

/// The name of a span, for work that is started here and carried out elsewhere.
struct Label {
  SpanKind kind = SpanKind::collective;
  std::string subject;
  int64_t bytes = 0;
};

/// From its construction to its end.
class Span {
 public:
  Span() = default;
  /// @param subject  the name of its subject; read while somebody records. Blanks in it become "_".
  Span(SpanKind kind, std::string_view subject, int64_t bytes = 0, Lane lane = Lane::thread) {
    if (recording()) begin(kind, subject, bytes, lane);
  }
  Span(const std::optional<Label>& label, Lane lane) {
    if (label) begin(label->kind, label->subject, label->bytes, lane);
  }
  ~Span() {
    if (open_) end();
  }
  Span(Span&&) noexcept;
  Span& operator=(Span&&) noexcept;

  /// When the bytes are known late.
  void set_bytes(int64_t bytes);
  void end();
  /// There was nothing to tell.
  void cancel();

 private:
  struct Open;
  void begin(SpanKind kind, std::string_view subject, int64_t bytes, Lane lane);
  std::unique_ptr<Open, void (*)(Open*)> open_{nullptr, [](Open*) {}};
};

/// For its length, what modules that only move bytes start on this thread is about this. The innermost counts.
class Topic {
 public:
  /// @param subject  outlives it  @param number  not negative: follows the subject, as in "bucket0"
  Topic(SpanKind kind, std::string_view subject, int64_t bytes, int64_t number = -1);
  ~Topic();
  Topic(const Topic&) = delete;
  Topic& operator=(const Topic&) = delete;

 private:
  friend std::optional<Label> label_of(std::string_view otherwise, int64_t bytes);
  SpanKind kind_;
  std::string_view subject_;
  int64_t bytes_, number_;
  const Topic* around_;
};

/// The label of the topic, or else of a collective of that name and so many bytes. Nothing while nobody records.
std::optional<Label> label_of(std::string_view otherwise, int64_t bytes);

/// An operator ends now, on this thread. @param begin  by c10::getApproximateTime()
void add_operator(std::string name, uint64_t begin);

/// Counts steps where there may be several optimizers: the one that steps most counts.
class StepCount {
 public:
  /// @return whether that was a step
  bool add(const void* optimizer);

 private:
  std::map<const void*, size_t> of_;
  size_t most_ = 0;
};

/// The `number`-th step of an optimizer is done: the next one begins. StepCount decides between several optimizers.
/// @param optimizer  which; null: the program's own count
void step_done(int64_t number, const void* optimizer);
/// Called in step_done(), on its thread, whether anybody records or not. One at a time; null: none. Not while steps are
/// being done.
void on_step(std::function<void(const void* optimizer)> listener);

}  // namespace accelerate::trace
