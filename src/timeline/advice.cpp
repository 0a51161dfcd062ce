#include <algorithm>
#include <initializer_list>
#include <map>

#include "timeline/report.hpp"
#include "utils/raise.hpp"
#include "utils/trace_kinds.hpp"

namespace accelerate::timeline {
namespace {

using trace::SpanKind;

// Shares of a step from which on something is worth a change.
constexpr double kData = 0.10, kExposed = 0.10, kSlowest = 0.10, kWeights = 0.10, kCheckpoint = 0.10, kOther = 0.30;
// A unit is needed twice in a step, by forward and backward; more often means that it left in between.
constexpr double kFetches = 2.5;
// Messages below this cost more time for themselves than for their bytes.
constexpr double kSmallMessage = 1 << 20;
// The first step allocates, chooses algorithms and meets the others.
constexpr double kFirstStep = 2.0;

double share(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

struct Totals {
  int64_t count = 0, bytes = 0, exposed = 0;
};
Totals totals(const Report& report, std::initializer_list<SpanKind> kinds) {
  Totals result;
  for (const auto& rank : report.ranks)
    for (const auto& exchange : rank.exchanges)
      for (const SpanKind kind : kinds)
        if (exchange.kind == name_of(kind))
          result.count += exchange.count, result.bytes += exchange.bytes, result.exposed += exchange.exposed;
  return result;
}

constexpr auto kEngine = {SpanKind::unit_gather, SpanKind::unit_wait, SpanKind::gradient_reduce, SpanKind::comm_wait};

/// Exchanges that are neither an engine's nor, as those that only a transport or a device names, anybody's.
struct Results {
  int64_t exposed = 0;
  std::string name;  ///< the two for which ranks wait the longest
};
Results results_of(const Report& report) {
  std::map<std::string, int64_t> by_kind;
  for (const auto& rank : report.ranks)
    for (const auto& exchange : rank.exchanges) {
      const auto is_it = [&](SpanKind kind) { return exchange.kind == name_of(kind); };
      const bool other = std::any_of(kEngine.begin(), kEngine.end(), is_it) ||
                         exchange.kind.find(':') != std::string::npos ||
                         exchange.kind.find("nccl") != std::string::npos;
      if (!other && exchange.exposed > 0) by_kind[exchange.kind] += exchange.exposed;
    }
  std::vector<std::pair<int64_t, std::string>> longest;
  Results results;
  for (const auto& [kind, time] : by_kind) {
    results.exposed += time;
    longest.emplace_back(-time, kind);
  }
  std::sort(longest.begin(), longest.end());
  for (size_t i = 0; i < std::min<size_t>(longest.size(), 2); ++i)
    results.name += (i > 0 ? " and " : "") + longest[i].second;
  return results;
}

std::string percent(double value) { return fmt::format("{:.0f} %", 100 * value); }

}  // namespace

std::vector<Advice> advise(const Report& report) {
  std::vector<Advice> result;
  const auto rule = [&](const char* name, double value, double threshold, const std::string& text) {
    if (value >= threshold) result.push_back({.rule = name, .value = value, .threshold = threshold, .text = text});
  };
  const Shares& all = report.overall;

  const double data = share(all.data, all.total);
  rule("data_wait", data, kData,
       percent(data) +
           " of the time waits for the loader. Give it more workers (num_workers) or let them read further "
           "ahead (prefetch_factor); make what a sample takes cheaper, or prepare the data once.");

  const double exposed = share(all.exposed, all.total);
  const auto gathers = totals(report, {SpanKind::unit_gather}), reduces = totals(report, {SpanKind::gradient_reduce});
  const auto results = results_of(report);
  const double of_results = share(results.exposed, all.total);
  const auto engine = totals(report, kEngine);
  std::string remedy;
  if (results.exposed > engine.exposed)
    remedy = fmt::format(
        "Most of it ({}) is {}, which the program calls for values of its own: gather losses and metrics every few "
        "steps, several of them at once, or add them up on each rank and reduce the sum at the end.",
        percent(of_results), results.name);
  else if (gathers.count > 0)
    remedy =
        "For sharded models: forward_prefetch = true and backward_prefetch = backward_pre start gathers earlier, "
        "reshard_after_forward = false saves those of the backward where memory allows it, larger units "
        "(min_num_params) make fewer of them.";
  else if (reduces.count > 0)
    remedy =
        "Gradient accumulation meets less often, a communication hook (bf16, PowerSGD) sends less, and a smaller "
        "first bucket (bucket_cap_mb) begins earlier.";
  else
    remedy = "Exchange less often (gradient accumulation, LocalSGD), or several values at once instead of one by one.";
  rule("exposed_communication", exposed, kExposed,
       percent(exposed) + " of the time waits for other ranks while nothing computes. " + remedy);

  const auto messages = totals(report, {SpanKind::unit_gather, SpanKind::gradient_reduce});
  if (messages.count > 0 && exposed - of_results >= kExposed && messages.bytes > 0) {
    const double mean = static_cast<double>(messages.bytes) / static_cast<double>(messages.count);
    // The rule holds below its threshold, so both sides change their sign.
    rule("small_messages", -mean, -kSmallMessage,
         fmt::format("A gather or reduction has {:.0f} KiB on average, so much of its time is the way and not the "
                     "bytes. Make units (min_num_params) or buckets (bucket_cap_mb) larger.",
                     mean / 1024));
  }

  if (report.slowest) {
    const auto& slowest = *report.slowest;
    const auto own = std::find_if(report.ranks.begin(), report.ranks.end(),
                                  [&](const RankReport& rank) { return rank.head.rank == slowest.rank; });
    const double behind =
        share(slowest.behind, own->overall.total / static_cast<int64_t>(std::max<size_t>(1, own->steps.size())));
    rule("slowest_rank", behind, kSlowest,
         fmt::format("The others wait for rank {}: it takes {:.3f} ms a step longer than they do ({} of its step; the "
                     "slowest in {} of {} steps). Does it have more data, other hardware, or neighbours on its cores? "
                     "split_batches and even batches share the work out evenly.",
                     slowest.rank, static_cast<double>(slowest.behind) / 1e6, percent(behind), slowest.steps,
                     slowest.of));
  }

  const double weights = share(all.weights, all.total);
  rule("weights_wait", weights, kWeights,
       percent(weights) +
           " of the time brings weights from host memory or files. Keep more of them on the device "
           "(max_memory), or fetch further ahead (prefetch).");
  double fetches = 0;
  std::string unit;
  for (const auto& rank : report.ranks) {
    const double each = static_cast<double>(rank.most_fetches) /
                        static_cast<double>(std::max<size_t>(1, rank.knows_steps ? rank.steps.size() : 1));
    if (each > fetches) fetches = each, unit = rank.most_fetched;
  }
  if (std::any_of(report.ranks.begin(), report.ranks.end(), [](const RankReport& rank) { return rank.knows_steps; }))
    rule("fetch_thrash", fetches, kFetches,
         fmt::format("Unit '{}' is fetched {:.1f} times a step, where twice is enough: it is evicted and comes back. "
                     "Raise max_memory by the size of a unit, or make units smaller.",
                     unit, fetches));

  const double checkpoint = share(all.checkpoint, all.total);
  rule("checkpoint", checkpoint, kCheckpoint,
       percent(checkpoint) + " of the time writes or reads checkpoints. Save less often, or to a faster disk.");

  const double other = share(all.other, all.total);
  rule("other", other, kOther,
       percent(other) +
           " of the time runs no operator and waits for nothing that has a name: the program's own code, "
           "printing, reading results from tensors (item()), or many tiny operators.");

  double first = 0;
  for (const auto& rank : report.ranks) {
    if (!rank.knows_steps || rank.steps.size() < 3) continue;
    std::vector<int64_t> later;
    for (size_t i = 1; i < rank.steps.size(); ++i) later.push_back(rank.steps[i].total);
    std::nth_element(later.begin(), later.begin() + static_cast<std::ptrdiff_t>(later.size() / 2), later.end());
    first = std::max(first, share(rank.steps.front().total, later[later.size() / 2]));
  }
  rule("first_step", first, kFirstStep,
       fmt::format("The first recorded step takes {:.1f} times as long as the others, and all sums count it: leave it "
                   "out by --skip_first or --warmup.",
                   first));
  return result;
}

}  // namespace accelerate::timeline
