#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "profiler/memory_timeline.hpp"
#include "utils/raise.hpp"

namespace accelerate::profiler {
namespace {

struct Look {
  const char* name;
  const char* light;
  const char* dark;
};
constexpr std::array<Look, kCategories> kLooks = {{{"parameter", "#2e7d4f", "#5fc092"},
                                                   {"optimizer state", "#c98a00", "#f2c13d"},
                                                   {"input", "#1b1b1b", "#e8e8e8"},
                                                   {"temporary", "#8e5ea2", "#b48ac6"},
                                                   {"activation", "#d1495b", "#f0717f"},
                                                   {"gradient", "#1f4fa8", "#5a7dec"},
                                                   {"autograd detail", "#4f9be8", "#9ac7ff"},
                                                   {"unknown", "#9a9a9a", "#6c7076"}}};
constexpr size_t kMostPoints = 1000;  ///< of the plot, which is about as many pixels wide

int64_t total(const MemoryMoment& moment) {
  int64_t sum = 0;
  for (const int64_t bytes : moment.bytes) sum += bytes;
  return sum;
}
bool holds_less(const MemoryMoment& a, const MemoryMoment& b) { return total(a) < total(b); }

std::string mib(int64_t bytes) { return fmt::format("{:.3f}", static_cast<double>(bytes) / (1 << 20)); }

/// The highest moment of each part of the time, so that no peak is lost.
std::vector<MemoryMoment> thinned(const std::vector<MemoryMoment>& moments) {
  if (moments.size() <= kMostPoints) return moments;
  std::vector<MemoryMoment> kept;
  const int64_t begin = moments.front().time_us, span = moments.back().time_us - begin + 1;
  const auto part = [&](const MemoryMoment& moment) {
    return (moment.time_us - begin) * static_cast<int64_t>(kMostPoints) / span;
  };
  for (const auto& moment : moments) {
    if (kept.empty() || part(kept.back()) != part(moment)) kept.push_back(moment);
    else if (holds_less(kept.back(), moment)) kept.back() = moment;
  }
  return kept;
}

}  // namespace

std::vector<MemoryChange> memory_changes(const std::vector<Lifetime>& lifetimes, at::Device device) {
  const at::Device wanted(device.type(), std::max<c10::DeviceIndex>(0, device.index()));
  std::vector<MemoryChange> changes;
  std::set<std::string> others;
  for (const auto& one : lifetimes) {
    if (one.device != wanted) {
      others.insert(one.device.is_cpu() ? "cpu" : one.device.str());
      continue;
    }
    using enum MemoryChange::Action;
    const bool older = one.begin_ns == Lifetime::kOutside;
    changes.push_back({one.begin_ns, older ? preexisting : create, one.bytes, one.category});
    if (one.end_ns != Lifetime::kOutside) changes.push_back({one.end_ns, destroy, -one.bytes, one.category});
  }
  if (changes.empty())
    raise<ConfigError>("export_memory_timeline: device is '{}', of which nothing was recorded, expected one of: {}",
                       device.str(), others.empty() ? "none" : fmt::format("{}", fmt::join(others, ", ")));
  std::stable_sort(changes.begin(), changes.end(), [](auto& a, auto& b) { return a.time_ns < b.time_ns; });
  return changes;
}

std::vector<MemoryMoment> memory_moments(const std::vector<MemoryChange>& changes) {
  // Memory from before the recording is there when it begins.
  const auto first = std::find_if(changes.begin(), changes.end(), [](auto& one) { return one.time_ns >= 0; });
  const int64_t begin_us = first == changes.end() ? 0 : first->time_ns / 1000;
  std::vector<MemoryMoment> moments;
  bool before = false;
  for (const auto& change : changes) {
    const bool older = change.time_ns < 0;
    const int64_t time_us = older ? begin_us : change.time_ns / 1000;
    if (moments.empty() || moments.back().time_us != time_us || before != older) {
      moments.push_back(moments.empty() ? MemoryMoment{} : moments.back());
      moments.back().time_us = time_us;
    }
    before = older;
    moments.back().bytes[static_cast<size_t>(change.category)] += change.bytes;
  }
  return moments;
}

std::string to_json(const std::vector<MemoryChange>& changes) {
  auto all = nlohmann::json::array();
  for (const auto& one : changes)
    all.push_back({one.time_ns, static_cast<int>(one.action), one.bytes, static_cast<int>(one.category)});
  return all.dump();
}

std::string to_json(const std::vector<MemoryMoment>& moments) {
  auto times = nlohmann::json::array(), sizes = nlohmann::json::array();
  for (const auto& moment : moments) {
    times.push_back(moment.time_us);
    auto row = nlohmann::json::array({0});  // the line on which a plot puts the first category
    for (const int64_t bytes : moment.bytes) row.push_back(bytes);
    sizes.push_back(std::move(row));
  }
  return nlohmann::json::array({times, sizes}).dump();
}

std::string to_page(const std::vector<MemoryMoment>& moments, at::Device device) {
  constexpr double kWidth = 1000, kHeight = 320, kLeft = 90, kTop = 10;
  const auto points = thinned(moments);
  const auto& peak = *std::max_element(moments.begin(), moments.end(), holds_less);
  const int64_t begin = moments.front().time_us;
  const auto span = static_cast<double>(std::max<int64_t>(1, moments.back().time_us - begin));
  const auto highest = static_cast<double>(std::max<int64_t>(1, total(peak)));
  const auto x = [&](int64_t us) { return kLeft + static_cast<double>(us - begin) / span * kWidth; };
  const auto y = [&](int64_t bytes) { return kTop + kHeight * (1 - static_cast<double>(bytes) / highest); };

  std::string light, dark, areas, legend, rows;
  std::vector<int64_t> below(points.size());
  for (size_t category = 0; category < kCategories; ++category) {
    const Look& look = kLooks[category];
    light += fmt::format("--c{}: {}; ", category, look.light);
    dark += fmt::format("--c{}: {}; ", category, look.dark);
    int64_t most = 0;
    for (const auto& moment : moments) most = std::max(most, moment.bytes[category]);
    if (most == 0) continue;
    // Steps: what a moment says holds until the next one. The upper edge to the right, the lower one back.
    std::string up, down;
    for (size_t i = 0; i < points.size(); ++i) {
      const double from = x(points[i].time_us), to = i + 1 < points.size() ? x(points[i + 1].time_us) : kLeft + kWidth;
      const double low = y(below[i]), high = y(below[i] += points[i].bytes[category]);
      up += fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", from, high, to, high);
      down.insert(0, fmt::format("{:.1f},{:.1f} {:.1f},{:.1f} ", to, low, from, low));
    }
    areas += fmt::format(R"(<polygon class="c{}" points="{}{}"><title>{}</title></polygon>)"
                         "\n",
                         category, up, down, look.name);
    legend += fmt::format(
        R"(<li><svg width="12" height="12" aria-hidden="true"><rect width="12" height="12" class="c{}"/></svg>{}</li>)"
        "\n",
        category, look.name);
    rows += fmt::format(R"(<tr><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td></tr>)"
                        "\n",
                        look.name, mib(most), mib(peak.bytes[category]), mib(moments.back().bytes[category]));
  }
  std::string fills, axis;
  for (size_t category = 0; category < kCategories; ++category)
    fills += fmt::format(".c{0} {{ fill: var(--c{0}); }} ", category);
  for (int i = 0; i <= 4; ++i) {
    const double line = kTop + kHeight * (1 - i / 4.0), column = kLeft + kWidth * i / 4;
    axis += fmt::format(
        R"(<line x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/><text x="{}" y="{:.1f}" text-anchor="end">{} MiB</text>)",
        kLeft, kLeft + kWidth, line, line, kLeft - 6, line + 4, mib(static_cast<int64_t>(highest * i / 4)));
    axis += fmt::format(R"(<text x="{:.1f}" y="{}" text-anchor="{}">{:.3f} ms</text>)"
                        "\n",
                        column, kTop + kHeight + 18, i == 4 ? "end" : "middle", span * i / 4 / 1000);
  }
  const std::string name = device.str();
  const std::string summary = fmt::format("At most {} MiB at once, {:.3f} ms after the first allocation.",
                                          mib(total(peak)), static_cast<double>(peak.time_us - begin) / 1000);
  return fmt::format(R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<link rel="icon" href="data:,">
<title>Memory of {0}</title>
<style>
  :root {{ --back: #fff; --text: #1b1b1b; --soft: #666; --line: #8884; {1}}}
  @media (prefers-color-scheme: dark) {{ :root {{ --back: #16181c; --text: #e8e8e8; --soft: #a0a0a0; --line: #8886; {2}}} }}
  body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.5em auto; padding: 0 1.2em; max-width: 1200px; background: var(--back); color: var(--text); }}
  h1 {{ font-size: 1.35em; margin: 0 0 .2em; }} .scroll {{ overflow-x: auto; }}
  svg text {{ fill: var(--soft); font: 12px system-ui, sans-serif; }} svg line {{ stroke: var(--line); }} {3}
  ul {{ display: flex; flex-wrap: wrap; gap: .2em 1.2em; list-style: none; padding: 0; }} li svg {{ margin-right: .4em; vertical-align: -1px; }}
  table {{ border-collapse: collapse; }} th, td {{ text-align: left; padding: .2em .9em .2em 0; border-bottom: 1px solid var(--line); }}
  td {{ text-align: right; font-variant-numeric: tabular-nums; }} caption {{ text-align: left; color: var(--soft); }}
</style>
</head>
<body>
<main>
<h1>Memory of {0}</h1>
<p>{4}</p>
<ul>
{5}</ul>
<div class="scroll"><svg width="{6}" height="{7}" role="img" aria-label="Bytes of {0} by category over time. {4}">
{8}{9}</svg></div>
<table><caption>MiB</caption>
<thead><tr><th scope="col">category</th><th scope="col">at most</th><th scope="col">at the peak</th><th scope="col">at the end</th></tr></thead>
<tbody>
{10}</tbody></table>
</main>
</body>
</html>
)",
                     name, light, dark, fills, summary, legend, kLeft + kWidth + 20, kTop + kHeight + 30, areas, axis,
                     rows);
}

}  // namespace accelerate::profiler
