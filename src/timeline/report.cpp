#include "timeline/report.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "utils/raise.hpp"

namespace accelerate::timeline {
namespace {

Shares shares_of(const Activity& activity, TimeSpan window) {
  Shares result{.total = window.end - window.begin,
                .compute = length_within(activity.compute, window),
                .communication = length_within(activity.communication, window),
                .exposed = length_within(activity.exposed, window),
                .data = length_within(activity.data, window),
                .weights = length_within(activity.weights, window),
                .checkpoint = length_within(activity.checkpoint, window)};
  result.other = result.total - result.compute - result.exposed - result.data - result.weights - result.checkpoint;
  return result;
}

std::vector<char> picture_of(const Activity& activity, TimeSpan window) {
  std::vector<char> picture;
  const int64_t all = window.end - window.begin;
  const auto begin_of = [&](int64_t i) {  // which must not overflow
    return window.begin + all / kPictureParts * i + all % kPictureParts * i / kPictureParts;
  };
  for (int64_t i = 0; i < kPictureParts; ++i) {
    const Shares part = shares_of(activity, {begin_of(i), begin_of(i + 1)});
    const int64_t times[] = {part.compute, part.exposed, part.data, part.weights, part.checkpoint, part.other};
    picture.push_back(kPictureLetters[std::max_element(std::begin(times), std::end(times)) - std::begin(times)]);
  }
  return picture;
}

RankReport report_of(const std::filesystem::path& file) {
  ActivityReader reader;
  RankReport rank{.head = read_trace(file, [&](const nlohmann::json& event) { reader.add(event); })};
  const Activity activity = reader.finish();
  if (activity.recorded.begin >= activity.recorded.end)
    raise<CheckpointError>(
        "trace '{}': it has no event that lasts, expected operators. Did the recording begin after the last step? See "
        "--skip_first, --wait and --warmup.",
        file.string());
  rank.on_device = activity.on_device;
  rank.devices = activity.devices;
  rank.knows_waits = activity.knows_waits;
  rank.first = rank.head.base + rank.head.clock_offset + activity.recorded.begin;
  std::vector<TraceStep> steps = rank.head.steps.empty() ? activity.steps : rank.head.steps;
  // The schedule may have begun or ended within one of them.
  std::erase_if(steps, [&](const TraceStep& step) {
    return step.end <= step.begin || step.begin >= activity.recorded.end || step.end <= activity.recorded.begin;
  });
  rank.knows_steps = !steps.empty();
  if (steps.empty()) steps.push_back({.number = 0, .begin = activity.recorded.begin, .end = activity.recorded.end});
  for (const auto& step : steps) {
    const TimeSpan window{step.begin, step.end};
    StepShares shares{shares_of(activity, window)};
    shares.number = step.number;
    shares.begin = rank.head.base + rank.head.clock_offset + step.begin;  // relative to the first of all: later
    if (rank.steps.size() < kMostPictures) shares.picture = picture_of(activity, window);
    rank.overall += shares;
    rank.steps.push_back(std::move(shares));
  }
  for (const auto& exchange : activity.exchanges)
    rank.exchanges.push_back({.kind = exchange.kind,
                              .count = exchange.count,
                              .bytes = exchange.bytes,
                              .total = length(exchange.while_it_lasts),
                              .exposed = length(exchange.exposed)});
  rank.operators.assign(
      activity.operators.begin(),
      activity.operators.begin() + static_cast<std::ptrdiff_t>(std::min(activity.operators.size(), kMostOperators)));
  for (const auto& [unit, count] : activity.fetches)
    if (count > rank.most_fetches || (count == rank.most_fetches && unit < rank.most_fetched))
      rank.most_fetches = count, rank.most_fetched = unit;
  return rank;
}

/// Foreign traces may not say who they are: then it is the order of their names.
void number_ranks(std::vector<RankReport>& ranks, std::vector<std::string>& notes) {
  const bool known = std::all_of(ranks.begin(), ranks.end(), [](const RankReport& r) { return r.head.knows_rank; });
  const auto twice = [&]() -> const RankReport* {
    for (size_t i = 0; i < ranks.size(); ++i)
      for (size_t j = 0; j < i; ++j)
        if (ranks[i].head.rank == ranks[j].head.rank) return &ranks[i];
    return nullptr;
  };
  if (const auto* const second = twice()) {
    if (known)
      raise<CheckpointError>(
          "trace '{}': it is of rank {}, and so is another trace of this folder, expected one of each rank. Are they "
          "of two runs? Give each run a folder of its own.",
          second->head.file.string(), second->head.rank);
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i].head.rank = static_cast<int64_t>(i);
    notes.emplace_back("The traces don't say of which rank they are: they are numbered by the order of their names.");
  }
  std::sort(ranks.begin(), ranks.end(),
            [](const RankReport& a, const RankReport& b) { return a.head.rank < b.head.rank; });
}

void note_what_lacks(const std::vector<RankReport>& ranks, std::vector<std::string>& notes) {
  const auto none_has = [&](auto has) { return std::none_of(ranks.begin(), ranks.end(), has); };
  const auto all_have = [&](auto has) { return std::all_of(ranks.begin(), ranks.end(), has); };
  std::set<int64_t> missing;
  for (const auto& rank : ranks)
    for (int64_t i = 0; i < std::min<int64_t>(rank.head.world_size, 4096); ++i) missing.insert(i);
  for (const auto& rank : ranks) missing.erase(rank.head.rank);
  if (!missing.empty())
    notes.push_back(fmt::format("{} of {} traces are missing: of rank {}. Nothing here counts them.", missing.size(),
                                missing.size() + ranks.size(), fmt::join(missing, ", ")));
  if (ranks.size() > 1 && !all_have([](const RankReport& r) { return r.head.knows_clock; })) {
    const bool one_host = all_have([&](const RankReport& r) { return r.head.host == ranks[0].head.host; });
    notes.emplace_back(
        one_host && !ranks[0].head.host.empty()
            ? "The clocks were not compared; the ranks were on one host and share its clock."
            : "The clocks were not compared: in the merged trace, ranks may be shifted against each other.");
  }
  if (!all_have([](const RankReport& r) { return r.knows_steps; }))
    notes.emplace_back("Some traces tell no steps: of these the whole recording counts as one.");
  if (none_has([](const RankReport& r) { return r.knows_waits || r.on_device; }) &&
      none_has([](const RankReport& r) { return r.exchanges.empty(); }))
    notes.emplace_back(
        "The traces don't say when threads waited for communication (programs of other libraries): communication "
        "counts as exposed while no operator ran.");
}

std::optional<Slowest> slowest_of(const std::vector<RankReport>& ranks) {
  if (ranks.size() < 2) return std::nullopt;
  std::map<int64_t, std::vector<int64_t>> own;  // by step, of each rank that has it
  for (const auto& rank : ranks)
    for (const auto& step : rank.steps) own[step.number].push_back(step.own());
  std::erase_if(own, [&](const auto& item) { return item.second.size() != ranks.size(); });
  if (own.empty()) return std::nullopt;
  std::vector<int64_t> sums(ranks.size()), slowest_in(ranks.size());
  for (const auto& [number, times] : own) {
    ++slowest_in[static_cast<size_t>(std::max_element(times.begin(), times.end()) - times.begin())];
    for (size_t i = 0; i < times.size(); ++i) sums[i] = plus(sums[i], times[i]);
  }
  const auto worst = static_cast<size_t>(std::max_element(sums.begin(), sums.end()) - sums.begin());
  std::vector<int64_t> others = sums;
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(worst));
  std::sort(others.begin(), others.end());
  const size_t middle = others.size() / 2;
  const int64_t median = others.size() % 2 ? others[middle] : plus(others[middle - 1], others[middle]) / 2;
  const auto count = static_cast<int64_t>(own.size());
  return Slowest{.rank = ranks[worst].head.rank,
                 .behind = (sums[worst] - median) / count,
                 .steps = slowest_in[worst],
                 .of = count};
}

}  // namespace

Shares& Shares::operator+=(const Shares& more) {
  for (auto part : {&Shares::total, &Shares::compute, &Shares::communication, &Shares::exposed, &Shares::data,
                    &Shares::weights, &Shares::checkpoint, &Shares::other})
    this->*part = plus(this->*part, more.*part);
  return *this;
}

Report analyse(const std::vector<std::filesystem::path>& traces) {
  Report report;
  for (const auto& trace : traces) report.ranks.push_back(report_of(trace));
  number_ranks(report.ranks, report.notes);
  note_what_lacks(report.ranks, report.notes);
  int64_t first = INT64_MAX;
  for (const auto& rank : report.ranks) first = std::min(first, rank.first);
  for (auto& rank : report.ranks) {
    report.overall += rank.overall;
    for (auto& step : rank.steps) step.begin -= first;
  }
  report.slowest = slowest_of(report.ranks);
  report.advice = advise(report);
  return report;
}

}  // namespace accelerate::timeline
