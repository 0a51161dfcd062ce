#include "launch/monitor/history.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

namespace accelerate::launcher {
namespace {

struct Figure {
  const char *name, *title, *unit;
  std::optional<double> (*of)(const RankView&);
};

template <class T> std::optional<double> number(const std::optional<T>& value) {
  return value ? std::optional(static_cast<double>(*value)) : std::nullopt;
}

std::optional<double> percent(const std::optional<double>& share) {
  return share ? std::optional(*share * 100) : std::nullopt;
}

constexpr std::array<Figure, History::kFigures> kAll = {{
    {"steps_per_second", "steps", "/s", [](const RankView& r) { return r.steps_per_second; }},
    {"tokens_per_second", "tokens", "/s", [](const RankView& r) { return r.tokens_per_second; }},
    {"utilisation", "model FLOPs utilisation", "%", [](const RankView& r) { return percent(utilisation(r)); }},
    {"flops_per_second", "model FLOPs", "FLOP/s", [](const RankView& r) { return r.flops_per_second; }},
    {"comm_share", "waiting for other ranks", "%", [](const RankView& r) { return percent(r.comm_share); }},
    {"data_share", "waiting for data", "%", [](const RankView& r) { return percent(r.data_share); }},
    {"resident_bytes", "memory", "bytes", [](const RankView& r) { return number(r.resident_bytes); }},
    {"gpu_bytes", "GPU memory", "bytes",
     [](const RankView& r) { return r.gpu ? std::optional(static_cast<double>(r.gpu->used_bytes)) : std::nullopt; }},
    {"cpu_percent", "CPU", "%", [](const RankView& r) { return r.cpu_percent; }},
}};

/// Four digits are more than a plot shows, and an answer with all of them would be three times as long.
double rounded(double value) {
  if (value == 0 || !std::isfinite(value)) return 0;
  const double scale = std::pow(10, 3 - std::floor(std::log10(std::abs(value))));
  return std::round(value * scale) / scale;
}

}  // namespace

History::Point History::merged(const Point& a, const Point& b) {
  Point both{.seconds = b.seconds, .looks = a.looks + b.looks, .figures = {}};
  for (size_t i = 0; i < std::max(a.figures.size(), b.figures.size()); ++i) {
    const auto x = a.at(i), y = b.at(i);
    if (!x || !y) both.figures.push_back(x ? x : y);
    else
      both.figures.push_back(Range{std::min(x->least, y->least),
                                   (x->mean * static_cast<double>(a.looks) + y->mean * static_cast<double>(b.looks)) /
                                       static_cast<double>(both.looks),
                                   std::max(x->most, y->most)});
  }
  return both;
}

std::optional<size_t> History::figure_of(const std::string& name) {
  const auto known = std::find(logged_.begin(), logged_.end(), name);
  if (known == logged_.end() && logged_.size() == kMostLogged) return std::nullopt;
  const auto place = static_cast<size_t>(known - logged_.begin());
  if (known == logged_.end()) logged_.push_back(name);
  return kFigures + place;
}

void History::add(const Snapshot& snapshot) {
  Point now{.seconds = snapshot.seconds, .looks = 1, .figures = {}};
  std::vector<double> known(kFigures);
  now.figures.resize(kFigures);
  const auto take = [&](size_t figure, const std::optional<double>& value) {
    if (!value || !std::isfinite(*value)) return;
    if (figure >= known.size()) known.resize(figure + 1), now.figures.resize(figure + 1);
    auto& range = now.figures[figure];
    if (!range) range = Range{*value, 0, *value};
    range->least = std::min(range->least, *value), range->most = std::max(range->most, *value);
    range->mean += (*value - range->mean) / ++known[figure];
  };
  for (const auto& rank : snapshot.ranks) {
    for (size_t i = 0; i < kFigures; ++i) take(i, kAll[i].of(rank));
    for (const auto& [name, value] : rank.logged)
      if (const auto figure = figure_of(name)) take(*figure, value);
  }
  if (!all_.empty() && all_.back().looks < looks_per_point_) all_.back() = merged(all_.back(), now);
  else all_.push_back(now);
  if (all_.size() < 2 * points_ || all_.back().looks < looks_per_point_) return;
  for (size_t i = 0; i < points_; ++i) all_[i] = merged(all_[2 * i], all_[2 * i + 1]);
  all_.resize(points_);
  looks_per_point_ *= 2;
}

nlohmann::ordered_json History::json() const {
  using json = nlohmann::ordered_json;
  json result{{"seconds", json::array()}, {"figures", json::array()}};
  for (const auto& point : all_) result["seconds"].push_back(rounded(point.seconds));
  const auto add = [&](size_t i, const std::string& name, const std::string& title, const char* unit) {
    if (std::none_of(all_.begin(), all_.end(), [&](const Point& point) { return point.at(i).has_value(); })) return;
    json least = json::array(), mean = json::array(), most = json::array();
    for (const auto& point : all_) {
      const auto range = point.at(i);
      least.push_back(range ? json(rounded(range->least)) : json());
      mean.push_back(range ? json(rounded(range->mean)) : json());
      most.push_back(range ? json(rounded(range->most)) : json());
    }
    result["figures"].push_back(
        {{"name", name}, {"title", title}, {"unit", unit}, {"least", least}, {"mean", mean}, {"most", most}});
  };
  for (size_t i = 0; i < logged_.size(); ++i) add(kFigures + i, "logged/" + logged_[i], logged_[i], "value");
  for (size_t i = 0; i < kFigures; ++i) add(i, kAll[i].name, kAll[i].title, kAll[i].unit);
  return result;
}

}  // namespace accelerate::launcher
