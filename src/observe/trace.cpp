#include "observe/trace.hpp"

#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "utils/thread_annotations.hpp"

namespace accelerate::trace {
namespace detail {
std::atomic<int> recorders{0};
}

namespace {

int64_t system_thread() {
  thread_local const int64_t id = ::gettid();
  return id;
}

/// Kineto's clock, so that spans and operators nest as they did: ticks of the processor until recording ends.
struct Ended {
  Event event;
  uint64_t begin, end;  ///< both kinds of approx_time_t fit
};
struct EndedStep {
  int64_t number;
  c10::approx_time_t end;
};

Mutex mutex;
thread_local const Topic* innermost = nullptr;

}  // namespace

struct Recorder::Impl {
  c10::ApproximateClockToUnixTimeConverter clock;
  c10::approx_time_t begin = c10::getApproximateTime();
  std::vector<Ended> ended;
  std::vector<EndedStep> steps;
  StepCount count;

  /// Guarded by `mutex`, as the members of those in it are.
  static std::vector<Impl*>& all() {
    static std::vector<Impl*> all;
    return all;
  }
};

Recorder::Recorder() : impl_(std::make_unique<Impl>()) {
  const MutexLock lock(mutex);
  Impl::all().push_back(impl_.get());
  detail::recorders.fetch_add(1, std::memory_order_relaxed);
}

Recorder::~Recorder() {
  if (impl_) stop();
}

Recording Recorder::stop() {
  const auto self = std::move(impl_);
  {
    const MutexLock lock(mutex);
    std::erase(Impl::all(), self.get());
    detail::recorders.fetch_sub(1, std::memory_order_relaxed);
  }
  const auto time = self->clock.makeConverter();
  Recording recording;
  for (auto& [event, begin, end] : self->ended) {
    event.begin_ns = time(begin);
    event.end_ns = time(end);
    recording.events.push_back(std::move(event));
  }
  auto begin = self->begin;
  for (const auto& step : self->steps) {
    recording.steps.push_back({step.number, time(begin), time(step.end)});
    begin = step.end;
  }
  return recording;
}

struct Span::Open {
  SpanKind kind;
  std::string subject;
  int64_t bytes;
  Lane lane;
  uint64_t thread;
  int64_t system_thread;
  c10::approx_time_t begin;
};

Span::Span(Span&&) noexcept = default;
Span& Span::operator=(Span&& other) noexcept {
  if (open_) end();
  open_ = std::move(other.open_);
  return *this;
}

void Span::begin(SpanKind kind, std::string_view subject, int64_t bytes, Lane lane) {
  open_ = {new Open{kind, std::string(subject), bytes, lane, at::RecordFunction::currentThreadId(), system_thread(), 0},
           [](Open* open) { delete open; }};
  open_->begin = c10::getApproximateTime();
}

void Span::set_bytes(int64_t bytes) {
  if (open_) open_->bytes = bytes;
}

void Span::cancel() { open_.reset(); }

void Span::end() {
  const auto end = c10::getApproximateTime();
  const auto open = std::exchange(open_, {nullptr, [](Open*) {}});
  if (!open) return;
  std::replace(open->subject.begin(), open->subject.end(), ' ', '_');
  const Event event{.name = fmt::format("{}{} {} bytes={}", kOurs, name_of(open->kind),
                                        open->subject.empty() ? std::string("(root)") : open->subject, open->bytes),
                    .thread = open->thread,
                    .system_thread = open->system_thread,
                    .lane = open->lane};
  Recorder::add(event, open->begin, end);
}

void Recorder::add(const Event& event, uint64_t begin, uint64_t end) {
  const MutexLock lock(mutex);
  for (auto* recorder : Impl::all())
    if (recorder->begin <= begin) recorder->ended.push_back({event, begin, end});
}

void add_operator(std::string name, uint64_t begin) {
  const auto end = c10::getApproximateTime();
  Recorder::add({.name = std::move(name),
                 .thread = at::RecordFunction::currentThreadId(),
                 .system_thread = system_thread(),
                 .is_operator = true},
                begin, end);
}

Topic::Topic(SpanKind kind, std::string_view subject, int64_t bytes, int64_t number)
    : kind_(kind), subject_(subject), bytes_(bytes), number_(number), around_(std::exchange(innermost, this)) {}
Topic::~Topic() { innermost = around_; }

std::optional<Label> label_of(std::string_view otherwise, int64_t bytes) {
  if (!recording()) return std::nullopt;
  if (!innermost) return Label{SpanKind::collective, std::string(otherwise), bytes};
  const Topic& topic = *innermost;
  std::string subject(topic.subject_);
  if (topic.number_ >= 0) subject += std::to_string(topic.number_);
  return Label{topic.kind_, std::move(subject), topic.bytes_};
}

bool StepCount::add(const void* optimizer) {
  if (++of_[optimizer] <= most_) return false;
  ++most_;
  return true;
}

namespace {
std::function<void(const void*)>& listener() {
  static std::function<void(const void*)> listener;
  return listener;
}
}  // namespace

void on_step(std::function<void(const void* optimizer)> heard) { listener() = std::move(heard); }

void step_done(int64_t number, const void* optimizer) {
  if (listener()) listener()(optimizer);
  if (!recording()) return;
  const EndedStep step{number, c10::getApproximateTime()};
  const MutexLock lock(mutex);
  for (auto* recorder : Recorder::Impl::all())
    if (recorder->count.add(optimizer)) recorder->steps.push_back(step);
}

}  // namespace accelerate::trace
