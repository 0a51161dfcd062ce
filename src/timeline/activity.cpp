#include "timeline/activity.hpp"

#include <algorithm>
#include <charconv>
#include <string_view>

#include "input/json.hpp"
#include "utils/trace_kinds.hpp"

namespace accelerate::timeline {
namespace {

using trace::kOurs;
using trace::SpanKind;

/// Scopes of ours in which a thread that trains waits. Others of its threads have none of them.
bool is_wait(std::string_view kind) {
  const auto known = trace::kind_called(kind);
  return known == SpanKind::comm_wait || known == SpanKind::unit_wait || known == SpanKind::loader_wait;
}

Doing doing_of(std::optional<SpanKind> kind) {
  if (!kind) return Doing::nothing;
  switch (*kind) {
    case SpanKind::loader_wait:
      return Doing::data;
    case SpanKind::checkpoint_write:
    case SpanKind::checkpoint_read:
      return Doing::checkpoint;
    case SpanKind::unit_fetch:
    case SpanKind::unit_wait:
    case SpanKind::unit_evict:
      return Doing::weights;
    case SpanKind::unit_gather:
    case SpanKind::gradient_reduce:
    case SpanKind::comm_wait:
    case SpanKind::collective:
      return Doing::communication;
  }
  return Doing::nothing;
}

/// The next word of a text, which it loses.
std::string_view take_word(std::string_view& text) {
  const auto end = std::min(text.find(' '), text.size());
  const auto word = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return word;
}

/// A thread's occupation in an event, if it was `before` around it.
Doing within(Doing before, Doing event) {
  // Batches are put together, and checkpoints are written, by operators and exchanges, too; a rank that waits for them
  // does not care. Weights are brought by copies.
  if (before == Doing::data || before == Doing::checkpoint || event == Doing::nothing) return before;
  if (before == Doing::weights && event == Doing::compute) return before;
  return event;
}

}  // namespace

bool is_of_device(std::string_view category) { return category == "kernel" || category.starts_with("gpu_"); }

ActivityReader::Label ActivityReader::label_of(const std::string& category, const std::string& name) {
  Label label{.name = name};
  const std::string_view text = name;
  if (category == "kernel") {
    label.on_device = true;
    label.doing = text.find("nccl") != text.npos ? Doing::communication : Doing::compute;
    if (label.doing == Doing::communication) label.kind = text.substr(0, text.find('('));
  } else if (category == "cpu_op") {
    // Starting an exchange is neither: how long it goes on is told by spans, or by what the transport has recorded.
    const bool starts =
        text.starts_with("c10d::") || text.starts_with("_c10d_functional") || text == "record_param_comms";
    label.doing = starts ? Doing::nothing : Doing::compute;
  } else if (category == "user_annotation" && text.starts_with(kOurs)) {
    std::string_view rest = text.substr(kOurs.size());
    label.kind = take_word(rest);
    const auto kind = trace::kind_called(label.kind);
    label.doing = doing_of(kind);
    while (!rest.empty()) {
      const auto word = take_word(rest);
      if (word.starts_with("bytes=")) std::from_chars(word.data() + 6, word.data() + word.size(), label.bytes);
      else if (label.subject.empty()) label.subject = word;
    }
    if (kind == SpanKind::collective && !label.subject.empty()) label.kind = label.subject;
  } else if (category == "user_annotation") {
    for (const char* transport : {"gloo:", "nccl:", "mpi:", "ucc:", "xccl:"})
      if (text.starts_with(transport)) label.kind = name, label.doing = Doing::communication, label.apart = true;
  }
  return label;
}

uint32_t ActivityReader::number_of(const std::string& category, const std::string& name) {
  const auto [found, fresh] = numbers_.try_emplace(category + '\0' + name, static_cast<uint32_t>(labels_.size()));
  if (fresh) labels_.push_back(label_of(category, name));
  return found->second;
}

void ActivityReader::add(const nlohmann::json& json) {
  const auto event = lasting(json);
  if (!event || event->category == "Trace") return;
  const auto process = json.find("pid"), thread = json.find("tid");
  const auto pid = process == json.end() ? std::nullopt : whole_number(*process);
  const auto tid = thread == json.end() ? std::nullopt : whole_number(*thread);
  if (!pid || !tid) return;
  recorded_ = {std::min(recorded_.begin, event->begin), std::max(recorded_.end, event->end)};
  if (is_of_device(event->category)) devices_.insert(*pid);
  const std::string_view name = event->name;
  if (event->category == "user_annotation") {
    constexpr std::string_view kProfilerStep = "ProfilerStep#", kStep = "accelerate::step ";
    const auto step = [&](std::string_view before, std::vector<TraceStep>& steps) {
      if (!name.starts_with(before)) return false;
      TraceStep found{.begin = event->begin, .end = event->end};
      std::from_chars(name.data() + before.size(), name.data() + name.size(), found.number);
      steps.push_back(found);
      return true;
    };
    if (step(kProfilerStep, profiler_steps_)) threads_[{*pid, *tid}].trains = true;
    else if (!step(kStep, own_steps_)) take(*event, {*pid, *tid});
    return;
  }
  take(*event, {*pid, *tid});
}

void ActivityReader::take(const Lasting& event, std::pair<int64_t, int64_t> thread) {
  const uint32_t number = number_of(event.category, event.name);
  const Label& label = labels_[number];
  const Event kept{.begin = event.begin, .end = event.end, .label = number};
  if (label.on_device) return kernels_.push_back(kept);
  if (label.apart) return apart_.push_back(kept);
  if (label.doing == Doing::nothing && label.kind.empty()) return;
  auto& where = threads_[thread];
  if (is_wait(label.kind) || event.name.starts_with("autograd::engine::evaluate_function")) where.trains = true;
  where.events.push_back(kept);
}

/// Waiting for a unit is communication where the unit comes from other ranks.
void ActivityReader::resolve_waits() {
  std::map<std::string, bool> gathered;
  for (const auto& label : labels_)
    if (label.kind == name_of(SpanKind::unit_gather)) gathered[label.subject] = true;
  for (auto& label : labels_) {
    if (!gathered.contains(label.subject)) continue;
    const auto kind = trace::kind_called(label.kind);
    if (kind == SpanKind::unit_wait) label.doing = Doing::communication;
    if (kind == SpanKind::unit_fetch || kind == SpanKind::unit_evict) label.doing = Doing::nothing;
  }
}

std::vector<ActivityReader::Piece> ActivityReader::pieces_of(Thread& thread, std::vector<Operator>& operators) const {
  struct Open {
    int64_t end;
    Doing doing;
    uint32_t label;
  };
  auto& events = thread.events;
  std::sort(events.begin(), events.end(),
            [](const Event& a, const Event& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
  std::vector<Piece> pieces;
  std::vector<Open> open;
  int64_t now = 0;
  const auto go_to = [&](int64_t moment) {
    if (!open.empty() && moment > now && open.back().doing != Doing::nothing) {
      pieces.push_back({.span = {now, moment}, .doing = open.back().doing, .label = open.back().label});
      if (labels_[open.back().label].doing == Doing::compute)
        operators[open.back().label].self = plus(operators[open.back().label].self, moment - now);
    }
    now = moment;
  };
  const auto close_until = [&](int64_t moment) {
    while (!open.empty() && open.back().end <= moment) {
      go_to(open.back().end);
      open.pop_back();
    }
  };
  for (const auto& event : events) {
    close_until(event.begin);
    go_to(event.begin);
    // Two clocks: an operator may seem to end some nanoseconds after the scope behind it has begun. It ends there.
    while (!open.empty() && open.back().end < event.end) open.pop_back();
    const Label& label = labels_[event.label];
    const Open around = open.empty() ? Open{event.end, Doing::nothing, event.label} : open.back();
    const Doing doing = within(around.doing, label.doing);
    if (label.doing == Doing::compute && doing == Doing::compute) ++operators[event.label].count;
    const bool says_it = doing == label.doing && label.doing != Doing::nothing;
    open.push_back({event.end, doing, says_it ? event.label : around.label});
  }
  close_until(INT64_MAX);
  return pieces;
}

Activity ActivityReader::finish() {
  resolve_waits();
  Activity result{.recorded = recorded_, .devices = std::move(devices_)};
  result.on_device = !kernels_.empty();
  std::vector<Operator> operators(labels_.size());
  std::vector<Exchange> exchanges(labels_.size());
  std::vector<Spans> blocked(labels_.size());
  Spans compute, data, weights, checkpoint, all_blocked, communication;
  const auto exchange = [&](const Event& event) {
    const Label& label = labels_[event.label];
    communication.push_back({event.begin, event.end});
    auto& kept = exchanges[event.label];
    ++kept.count;
    kept.bytes = plus(kept.bytes, label.bytes);
    kept.while_it_lasts.push_back({event.begin, event.end});
  };

  const bool any_trains = std::any_of(threads_.begin(), threads_.end(), [](auto& item) { return item.second.trains; });
  for (auto& [id, thread] : threads_) {
    for (const auto& event : thread.events) {
      const Label& label = labels_[event.label];
      if (label.doing == Doing::communication) exchange(event);
      if (label.kind == name_of(SpanKind::unit_fetch)) ++result.fetches[label.subject];
      if (const auto kind = trace::kind_called(label.kind); kind == SpanKind::comm_wait || kind == SpanKind::unit_wait)
        result.knows_waits = true;
    }
    if (any_trains && !thread.trains) continue;
    for (const auto& piece : pieces_of(thread, operators)) {
      if (piece.doing == Doing::compute) compute.push_back(piece.span);
      if (piece.doing == Doing::data) data.push_back(piece.span);
      if (piece.doing == Doing::weights) weights.push_back(piece.span);
      if (piece.doing == Doing::checkpoint) checkpoint.push_back(piece.span);
      if (piece.doing != Doing::communication) continue;
      all_blocked.push_back(piece.span);
      blocked[piece.label].push_back(piece.span);
    }
  }
  for (const auto& event : apart_) exchange(event);
  if (result.on_device) {  // threads only start the work: what they call operators is not the computation
    compute.clear();
    operators.assign(labels_.size(), {});
  }
  for (const auto& event : kernels_) {
    if (labels_[event.label].doing == Doing::communication) {
      exchange(event);
      continue;
    }
    compute.push_back({event.begin, event.end});
    ++operators[event.label].count;
    operators[event.label].self = plus(operators[event.label].self, event.end - event.begin);
  }

  // If the trace shows where threads wait, work behind a program's own code need not be taken for waiting.
  const bool by_waits = result.knows_waits && !result.on_device;
  result.compute = united(std::move(compute));
  result.communication = united(std::move(communication));
  result.exposed = without(by_waits ? united(std::move(all_blocked)) : result.communication, result.compute);
  Spans taken = result.compute;
  const auto rest_of = [&](Spans spans, const Spans& more) {
    taken.insert(taken.end(), more.begin(), more.end());
    taken = united(std::move(taken));
    return without(united(std::move(spans)), taken);
  };
  result.data = rest_of(std::move(data), result.exposed);
  result.weights = rest_of(std::move(weights), result.data);
  result.checkpoint = rest_of(std::move(checkpoint), result.weights);

  std::map<std::string, Exchange> kinds;
  for (size_t i = 0; i < labels_.size(); ++i) {
    if (operators[i].count > 0) {
      operators[i].name = labels_[i].name;
      result.operators.push_back(std::move(operators[i]));
    }
    if (labels_[i].kind.empty() || exchanges[i].count == 0) continue;
    auto& kind = kinds[labels_[i].kind];
    kind.kind = labels_[i].kind;
    kind.count += exchanges[i].count;
    kind.bytes = plus(kind.bytes, exchanges[i].bytes);
    auto& lasted = exchanges[i].while_it_lasts;
    kind.while_it_lasts.insert(kind.while_it_lasts.end(), lasted.begin(), lasted.end());
    const auto& exposed = by_waits ? blocked[i] : lasted;
    kind.exposed.insert(kind.exposed.end(), exposed.begin(), exposed.end());
  }
  for (auto& [name, kind] : kinds) {
    kind.while_it_lasts = united(std::move(kind.while_it_lasts));
    kind.exposed = without(united(std::move(kind.exposed)), result.compute);
    result.exchanges.push_back(std::move(kind));
  }
  std::sort(result.exchanges.begin(), result.exchanges.end(),
            [](const Exchange& a, const Exchange& b) { return length(a.while_it_lasts) > length(b.while_it_lasts); });
  std::sort(result.operators.begin(), result.operators.end(),
            [](const Operator& a, const Operator& b) { return a.self > b.self; });

  result.steps = std::move(profiler_steps_.empty() ? own_steps_ : profiler_steps_);
  std::sort(result.steps.begin(), result.steps.end(),
            [](const TraceStep& a, const TraceStep& b) { return a.begin < b.begin; });
  return result;
}

}  // namespace accelerate::timeline
