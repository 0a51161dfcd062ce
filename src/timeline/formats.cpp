#include <algorithm>

#include "timeline/report.hpp"
#include "utils/raise.hpp"

namespace accelerate::timeline {
namespace {

using nlohmann::ordered_json;

constexpr size_t kMostStepLines = 20;  // of all ranks

double us(int64_t nanoseconds) { return static_cast<double>(nanoseconds) / 1000; }

struct SharePart {
  const char* name;
  int64_t Shares::*time;
};
constexpr SharePart kParts[] = {
    {"compute", &Shares::compute}, {"exposed", &Shares::exposed},       {"data", &Shares::data},
    {"weights", &Shares::weights}, {"checkpoint", &Shares::checkpoint}, {"other", &Shares::other}};

ordered_json shares_json(const Shares& shares) {
  ordered_json json{{"total_us", us(shares.total)}, {"communication_us", us(shares.communication)}};
  for (const auto& part : kParts) json[std::string(part.name) + "_us"] = us(shares.*part.time);
  return json;
}

ordered_json rank_json(const RankReport& rank) {
  ordered_json json{{"rank", rank.head.rank}, {"file", rank.head.file.filename().string()}, {"host", rank.head.host}};
  json["clock"] = rank.head.knows_clock
                      ? ordered_json{{"offset_us", us(rank.head.clock_offset)}, {"error_us", us(rank.head.clock_error)}}
                      : ordered_json(nullptr);
  json["overall"] = shares_json(rank.overall);
  for (auto* const list : {"steps", "communication", "operators"}) json[list] = ordered_json::array();
  for (const auto& step : rank.steps) {
    ordered_json entry{{"step", step.number}, {"begin_us", us(step.begin)}};
    entry.update(shares_json(step));
    json["steps"].push_back(std::move(entry));
  }
  for (const auto& exchange : rank.exchanges)
    json["communication"].push_back({{"kind", exchange.kind},
                                     {"count", exchange.count},
                                     {"bytes", exchange.bytes},
                                     {"total_us", us(exchange.total)},
                                     {"exposed_us", us(exchange.exposed)}});
  for (const auto& op : rank.operators)
    json["operators"].push_back({{"name", op.name}, {"count", op.count}, {"self_us", us(op.self)}});
  return json;
}

/// A row of times in milliseconds; a dash stands for nothing.
std::string row(const std::string& title, const Shares& shares, int64_t count) {
  const auto ms = [&](int64_t time) {
    return time == 0 ? std::string("-")
                     : fmt::format("{:.3f}", static_cast<double>(time) / 1e6 / static_cast<double>(count));
  };
  std::string text = fmt::format("{:<22}{:>11}{:>15}", title, ms(shares.total), ms(shares.communication));
  for (const auto& part : kParts) text += fmt::format("{:>11}", ms(shares.*part.time));
  return text + "\n";
}

}  // namespace

ordered_json to_json(const Report& report) {
  ordered_json json{{"version", 1}, {"overall", shares_json(report.overall)}};
  json["slowest"] = !report.slowest ? ordered_json(nullptr)
                                    : ordered_json{{"rank", report.slowest->rank},
                                                   {"behind_us", us(report.slowest->behind)},
                                                   {"steps", report.slowest->steps},
                                                   {"of", report.slowest->of}};
  for (auto* const list : {"advice", "notes", "ranks"}) json[list] = ordered_json::array();
  for (const auto& advice : report.advice)
    json["advice"].push_back(
        {{"rule", advice.rule}, {"value", advice.value}, {"threshold", advice.threshold}, {"text", advice.text}});
  for (const auto& note : report.notes) json["notes"].push_back(note);
  for (const auto& rank : report.ranks) json["ranks"].push_back(rank_json(rank));
  return json;
}

std::string to_text(const Report& report) {
  std::string text = fmt::format("{:<22}{:>11}{:>15}", "ms per step", "step", "communication");
  for (const auto& part : kParts) text += fmt::format("{:>11}", part.name);
  text += "\n";
  size_t steps = 0;
  for (const auto& rank : report.ranks) {
    text += row(fmt::format("rank {} ({} steps)", rank.head.rank, rank.steps.size()), rank.overall,
                static_cast<int64_t>(rank.steps.size()));
    steps = std::max(steps, rank.steps.size());
  }
  if (report.slowest)
    text += fmt::format(
        "\nThe slowest rank is {}: {:.3f} ms per step more than the others, the slowest in {} of {} steps.\n",
        report.slowest->rank, us(report.slowest->behind) / 1000, report.slowest->steps, report.slowest->of);
  if (!report.advice.empty()) text += "\nWhat to do:\n";
  for (const auto& advice : report.advice) text += "- " + advice.text + "\n";
  if (!report.notes.empty()) text += "\nNote:\n";
  for (const auto& note : report.notes) text += "- " + note + "\n";
  const size_t shown = std::min(steps, std::max<size_t>(1, kMostStepLines / std::max<size_t>(1, report.ranks.size())));
  if (steps > 1) text += "\nStep by step:\n";
  for (size_t i = 0; steps > 1 && i < shown; ++i)
    for (const auto& rank : report.ranks)
      if (i < rank.steps.size())
        text += row(fmt::format("step {} of rank {}", rank.steps[i].number, rank.head.rank), rank.steps[i], 1);
  if (steps > shown) text += fmt::format("… and {} steps more (--json has all)\n", steps - shown);
  return text;
}

}  // namespace accelerate::timeline
