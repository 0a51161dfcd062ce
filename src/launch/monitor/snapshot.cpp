#include "launch/monitor/snapshot.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "input/plain_text.hpp"

namespace accelerate::launcher {
namespace {

template <class... Arguments> std::string format(const char* pattern, Arguments... arguments) {
  char text[64];
  std::snprintf(text, sizeof(text), pattern, arguments...);
  return text;
}

std::string bytes(int64_t count) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(count);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < std::size(units)) value /= 1024, ++unit;
  return format(value < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", value, units[unit]);
}

std::string clock(double seconds) {
  const auto whole = static_cast<long long>(seconds);
  return whole < 3600 ? format("%lld:%02lld", whole / 60, whole % 60)
                      : format("%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string gpu(const GpuUse& use) {
  return std::to_string(use.index) + ": " + (use.busy_percent ? std::to_string(*use.busy_percent) + " %, " : "") +
         bytes(use.used_bytes) + " of " + bytes(use.total_bytes);
}

std::string rate(double per_second) {
  return format(per_second >= 100 ? "%.0f" : per_second >= 1 ? "%.1f" : "%.3f", per_second);
}

/// "21.4k", "989T"
std::string with_prefix(double value) {
  const char* prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t prefix = 0;
  while (value >= 999.5 && prefix + 1 < std::size(prefixes)) value /= 1000, ++prefix;
  return format(value < 99.95 && (prefix > 0 || value < 9.95) ? "%.1f%s" : "%.0f%s", value, prefixes[prefix]);
}

std::string percent(double share) { return format("%.*f", share < 0.0995 ? 1 : 0, share * 100); }

struct Column {
  const char* title;
  size_t width;
  bool number;
  std::string (*text)(const RankView&);
  /// Left out where no rank has it, or where the line is too narrow for it and the last line; null: never.
  bool (*known)(const RankView&) = nullptr;
};

constexpr auto kNothing = "-";

const Column kColumns[] = {
    {"rank", 4, false, [](const RankView& r) { return r.name; }},
    {"state", 16, false, [](const RankView& r) { return r.end.empty() ? r.state : r.state + " " + r.end; }},
    {"pid", 7, true, [](const RankView& r) { return r.pid > 0 ? std::to_string(r.pid) : kNothing; }},
    {"time", 7, true, [](const RankView& r) { return clock(r.seconds); }},
    {"steps", 7, true, [](const RankView& r) { return r.steps ? std::to_string(*r.steps) : kNothing; }},
    {"step/s", 6, true, [](const RankView& r) { return r.steps_per_second ? rate(*r.steps_per_second) : kNothing; }},
    {"CPU %", 5, true, [](const RankView& r) { return r.cpu_percent ? format("%.0f", *r.cpu_percent) : kNothing; }},
    {"memory", 8, true, [](const RankView& r) { return r.resident_bytes ? bytes(*r.resident_bytes) : kNothing; }},
    {"token/s", 7, true,
     [](const RankView& r) { return r.tokens_per_second ? with_prefix(*r.tokens_per_second) : kNothing; },
     [](const RankView& r) { return r.tokens_per_second.has_value(); }},
    {"comm %", 6, true, [](const RankView& r) { return r.comm_share ? percent(*r.comm_share) : kNothing; },
     [](const RankView& r) { return r.comm_share.has_value(); }},
    {"data %", 6, true, [](const RankView& r) { return r.data_share ? percent(*r.data_share) : kNothing; },
     [](const RankView& r) { return r.data_share.has_value(); }},
    {"MFU %", 5, true, [](const RankView& r) { return utilisation(r) ? percent(*utilisation(r)) : kNothing; },
     [](const RankView& r) { return utilisation(r).has_value(); }},
    {"FLOP/s", 6, true,
     [](const RankView& r) { return r.flops_per_second ? with_prefix(*r.flops_per_second) : kNothing; },
     [](const RankView& r) { return r.flops_per_second.has_value(); }},
    {"GPU", 27, false, [](const RankView& r) { return r.gpu ? gpu(*r.gpu) : kNothing; },
     [](const RankView& r) { return r.gpu.has_value(); }},
    {"last line", 0, false, [](const RankView& r) { return r.last_line; }},
};

/// How many ranks are in which state: "3 running, 1 failed".
std::string states(const std::vector<const RankView*>& ranks) {
  std::vector<std::pair<std::string, int64_t>> counts;
  for (const auto* rank : ranks) {
    const auto found =
        std::find_if(counts.begin(), counts.end(), [&](const auto& known) { return known.first == rank->state; });
    if (found == counts.end()) counts.emplace_back(rank->state, 1);
    else ++found->second;
  }
  std::string text;
  for (const auto& [state, count] : counts) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + state;
  return text;
}

std::string summary(const Snapshot& s) {
  std::vector<const RankView*> all;
  for (const auto& rank : s.ranks) all.push_back(&rank);
  std::string text = clock(s.seconds) + ": " + (s.waiting ? "waiting for the other machines" : states(all));
  if (s.num_machines > 1)
    text += "; machine " + std::to_string(s.machine_rank) + " of " + std::to_string(s.num_machines);
  if (s.world_size > static_cast<int64_t>(s.ranks.size()))
    text += "; " + std::to_string(s.world_size) + " ranks on all machines";
  double tokens = 0;
  for (const auto& rank : s.ranks) tokens += rank.tokens_per_second.value_or(0);
  if (tokens > 0) text += "; " + with_prefix(tokens) + " tokens/s" + (s.num_machines > 1 ? " here" : "");
  if (s.max_restarts > 0) text += "; restart " + std::to_string(s.attempt) + " of " + std::to_string(s.max_restarts);
  return text;
}

/// The columns that fit. A column without any value is left out, except those that a program could fill.
std::vector<Column> columns_of(const Snapshot& s, size_t width) {
  constexpr size_t kForLastLine = 24;
  std::vector<Column> columns;
  size_t names = 4, taken = kForLastLine;
  for (const auto& rank : s.ranks) names = std::clamp<size_t>(cells(rank.name), names, 24);
  for (const Column& column : kColumns)
    if (!column.known) taken += 2 + (column.title == std::string("rank") ? names : column.width);
  for (Column column : kColumns) {
    if (column.title == std::string("rank")) column.width = names;
    if (column.known) {
      const bool gpu = column.title == std::string("GPU");  // which was always shown
      if (std::none_of(s.ranks.begin(), s.ranks.end(), column.known) || (!gpu && taken + 2 + column.width > width))
        continue;
      taken += 2 + column.width;
    }
    columns.push_back(column);
  }
  return columns;
}

const char* colour_of(const std::string& state) {
  if (state == "failed") return "\033[31m";
  if (state == "running" || state == "done") return "\033[32m";
  return "\033[33m";
}

}  // namespace

std::optional<double> utilisation(const RankView& rank) {
  if (!rank.flops_per_second || !rank.peak_flops) return std::nullopt;
  return *rank.flops_per_second / *rank.peak_flops;
}

nlohmann::ordered_json to_json(const Snapshot& s) {
  using json = nlohmann::ordered_json;
  const auto maybe = [](const auto& value) { return value ? json(*value) : json(); };
  json ranks = json::array();
  for (const auto& rank : s.ranks) {
    json gpu;
    if (rank.gpu)
      gpu = {{"index", rank.gpu->index},
             {"name", plain_text(rank.gpu->name)},
             {"busy_percent", maybe(rank.gpu->busy_percent)},
             {"used_bytes", rank.gpu->used_bytes},
             {"total_bytes", rank.gpu->total_bytes}};
    json logged = json::object();
    for (const auto& [name, value] : rank.logged) logged[name] = value;
    ranks.push_back({{"name", rank.name},
                     {"local_rank", rank.local_rank},
                     {"pid", rank.pid},
                     {"state", rank.state},
                     {"end", rank.end},
                     {"seconds", rank.seconds},
                     {"steps", maybe(rank.steps)},
                     {"steps_per_second", maybe(rank.steps_per_second)},
                     {"cpu_percent", maybe(rank.cpu_percent)},
                     {"resident_bytes", maybe(rank.resident_bytes)},
                     {"gpu", gpu},
                     {"tokens", maybe(rank.tokens)},
                     {"tokens_per_second", maybe(rank.tokens_per_second)},
                     {"flops_per_second", maybe(rank.flops_per_second)},
                     {"peak_flops", maybe(rank.peak_flops)},
                     {"utilisation", maybe(utilisation(rank))},
                     {"comm_share", maybe(rank.comm_share)},
                     {"data_share", maybe(rank.data_share)},
                     {"last_line", rank.last_line},
                     {"logged", logged}});
  }
  return {{"program", plain_text(s.program)},
          {"summary", summary(s)},
          {"seconds", s.seconds},
          {"interval", s.interval},
          {"attempt", s.attempt},
          {"max_restarts", s.max_restarts},
          {"machine_rank", s.machine_rank},
          {"num_machines", s.num_machines},
          {"world_size", s.world_size},
          {"waiting", s.waiting},
          {"ranks", ranks}};
}

std::vector<std::string> to_lines(const Snapshot& s, size_t width, size_t max_lines, bool colours) {
  const auto styled = [&](const char* style, const std::string& text) {
    return colours ? style + text + "\033[0m" : text;
  };
  std::vector<std::string> lines{styled(
      "\033[1m", fitted(plain_text(s.program) + ", " + summary(s) + (s.url.empty() ? "" : "; " + s.url), width))};
  const auto columns = columns_of(s, width);
  const auto row = [&](auto text_of) {
    std::string line;
    size_t left = width;
    for (const auto& column : columns) {
      const size_t gap = line.empty() ? 0 : 2, here = column.width ? column.width : left - std::min(left, gap);
      if (left < gap + std::min<size_t>(here, 4)) break;
      const size_t room = std::min(here, left - gap);
      line += std::string(gap, ' ') + text_of(column, room);
      left -= gap + room;
    }
    return line + std::string(left, ' ');
  };
  if (max_lines < 2) return lines;
  lines.push_back(styled(
      "\033[2m", row([](const Column& column, size_t room) { return fitted(column.title, room, column.number); })));
  std::vector<const RankView*> shown, hidden;
  for (const auto& rank : s.ranks) shown.push_back(&rank);
  if (shown.size() > max_lines - 2) {
    std::stable_sort(shown.begin(), shown.end(),
                     [](const auto* a, const auto* b) { return (a->state == "failed") > (b->state == "failed"); });
    hidden.assign(shown.begin() + static_cast<std::ptrdiff_t>(max_lines - std::min<size_t>(max_lines, 3)), shown.end());
    shown.resize(shown.size() - hidden.size());
    std::sort(shown.begin(), shown.end());  // by place in the snapshot, which is by rank
  }
  for (const auto* rank : shown)
    lines.push_back(row([&](const Column& column, size_t room) {
      const std::string text = fitted(column.text(*rank), room, column.number);
      return column.title == std::string("state") ? styled(colour_of(rank->state), text) : text;
    }));
  if (!hidden.empty() && max_lines > 2)
    lines.push_back(fitted("and " + std::to_string(hidden.size()) + " more: " + states(hidden), width));
  return lines;
}

}  // namespace accelerate::launcher
