// Steps of several ranks, what to do about them, and one timeline of all.
#include <gmock/gmock.h>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "timeline/report.hpp"
#include "timeline_support.hpp"

namespace {

using namespace accelerate::timeline;
using namespace timeline_test;
using accelerate::CheckpointError;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// The report on traces of ranks 0, 1, …
Report report_on(const std::vector<Trace>& traces, const std::string& name = "report") {
  const auto in = folder(name);
  for (size_t i = 0; i < traces.size(); ++i) write(in / ("profile_" + std::to_string(i) + ".json"), traces[i].text());
  return analyse(traces_in(in));
}

std::vector<std::string> rules_of(const Report& report) {
  std::vector<std::string> rules;
  for (const auto& advice : report.advice) rules.push_back(advice.rule);
  return rules;
}

/// Steps of 100 us that compute from begin to end, but for what `fill` puts in. @param fill  gets a trace and a begin
template <class Fill> Trace steps(int64_t count, Fill fill) {
  Trace trace;
  for (int64_t i = 0; i < count; ++i) {
    const double begin = 100.0 * static_cast<double>(i);
    trace.profiler_step(i, begin, begin + 100);
    fill(trace, begin);
  }
  return trace;
}
/// Computes but for `waits` us, which are spent on `kind`.
Trace waiting(const std::string& kind, double waits, int64_t bytes = 0, int64_t count = 5) {
  return steps(count, [&](Trace& trace, double begin) {
    trace.op("mm", begin, begin + 100 - waits);
    trace.ours(kind, begin + 100 - waits, begin + 100, bytes);
  });
}

TEST(TimelineReport, AStepsPartsSumUpToIt) {
  Trace trace;
  trace.profiler_step(3, 0, 100).profiler_step(4, 100, 180);
  trace.ours("loader_wait", 0, 7).op("mm", 10, 40).ours("comm_wait", 40, 60, 10).ours("checkpoint_write", 60, 65);
  trace.ours("unit_wait", 70, 72).op("mm", 95, 110);
  const auto report = report_on({trace});
  ASSERT_EQ(report.ranks.size(), 1);
  const auto& [first, second] = std::tie(report.ranks[0].steps[0], report.ranks[0].steps[1]);
  EXPECT_EQ(first.number, 3);
  EXPECT_EQ(first.total, 100'000);
  EXPECT_EQ(first.data, 7'000);
  EXPECT_EQ(first.compute, 35'000);
  EXPECT_EQ(first.exposed, 20'000);
  EXPECT_EQ(first.communication, 20'000);
  EXPECT_EQ(first.checkpoint, 5'000);
  EXPECT_EQ(first.weights, 2'000);
  EXPECT_EQ(first.other, 31'000);
  EXPECT_EQ(second.number, 4);
  EXPECT_EQ(second.compute, 10'000);
  EXPECT_EQ(second.other, 70'000);
  EXPECT_EQ(report.overall.total, 180'000);
  EXPECT_EQ(report.overall.compute, 45'000);
  // 500 parts: 35 of data, 15 of nothing, 150 of computing, …
  EXPECT_EQ(std::string(first.picture.begin(), first.picture.end()),
            std::string(35, 'd') + std::string(15, 'o') + std::string(150, 'c') + std::string(100, 'e') +
                std::string(25, 'k') + std::string(25, 'o') + std::string(10, 'w') + std::string(115, 'o') +
                std::string(25, 'c'));
}

TEST(TimelineReport, StepsAreTheHeadsElseTheProfilersElseTheSpans) {
  Trace trace;
  trace.op("mm", 0, 100).ours("step", 30, 60, 0, "2", 9).ours("step", 0, 30, 0, "1", 9);
  const auto windows = [](const Trace& of) {
    std::vector<std::pair<int64_t, int64_t>> result;
    const auto report = report_on({of});
    for (const auto& step : report.ranks[0].steps) result.emplace_back(step.number, step.total);
    return result;
  };
  EXPECT_THAT(windows(trace), ElementsAre(std::pair(1, 30'000), std::pair(2, 30'000)));
  trace.profiler_step(5, 10, 50);
  EXPECT_THAT(windows(trace), ElementsAre(std::pair(5, 40'000)));
  trace.head["accelerate_steps"] = {{{"step", 9}, {"begin_us", 20}, {"end_us", 40}},
                                    {{"step", 8}, {"begin_us", 0}, {"end_us", 20}},
                                    {{"step", 10}, {"begin_us", 500}, {"end_us", 600}}};  // after the recording
  EXPECT_THAT(windows(trace), ElementsAre(std::pair(8, 20'000), std::pair(9, 20'000)));
}

TEST(TimelineReport, WhatTracesLackIsSaid) {
  EXPECT_THAT(report_on({waiting("comm_wait", 1)}).notes, IsEmpty());
  EXPECT_THAT(report_on({Trace().op("mm", 0, 10)}).notes, ElementsAre(HasSubstr("tell no steps")));
  EXPECT_THAT(report_on({waiting("comm_wait", 1).of(0, 4)}).notes,
              ElementsAre(HasSubstr("3 of 4 traces are missing: of rank 1, 2, 3.")));
  auto apart =
      steps(1, [](Trace& trace, double) { trace.op("mm", 0, 10).add("user_annotation", "gloo:broadcast", 5, 50, 9); });
  EXPECT_THAT(report_on({apart}).notes, ElementsAre(HasSubstr("don't say when threads waited")));
  auto first = waiting("comm_wait", 1).of(0, 2), second = waiting("comm_wait", 1).of(1, 2);
  EXPECT_THAT(report_on({first, second}).notes, ElementsAre(HasSubstr("may be shifted against each other")));
  first.head["host_name"] = second.head["host_name"] = "one";
  EXPECT_THAT(report_on({first, second}).notes, ElementsAre(HasSubstr("were on one host")));
  first.head["accelerate_clock"] = second.head["accelerate_clock"] = {{"offset_ns", 0}, {"error_ns", 0}};
  EXPECT_THAT(report_on({first, second}).notes, IsEmpty());
}

TEST(TimelineReport, RanksOfTwoRunsAreNotMixed) {
  const auto trace = waiting("comm_wait", 1).of(1, 2);
  EXPECT_THAT(support::message_of<CheckpointError>([&] {
                report_on({trace, trace});
              }),
              HasSubstr("it is of rank 1, and so is another trace"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { report_on({Trace()}); }), HasSubstr("no event that lasts"));
  // Foreign files that don't say it go by the order of names.
  const auto in = folder("foreign");
  write(in / "b.1.pt.trace.json", waiting("comm_wait", 1).text()),
      write(in / "a.1.pt.trace.json", waiting("comm_wait", 2).text());
  const auto report = analyse(traces_in(in));
  EXPECT_EQ(report.ranks[0].head.rank, 0);
  EXPECT_EQ(report.ranks[0].head.file, in / "a.1.pt.trace.json");
  EXPECT_EQ(report.ranks[1].head.rank, 1);
  EXPECT_THAT(report.notes, testing::Contains(HasSubstr("numbered by the order of their names")));
}

TEST(TimelineReport, TheSlowestRankIsTheOneForWhichOthersWait) {
  EXPECT_FALSE(report_on({waiting("comm_wait", 10)}).slowest);
  const auto report = report_on({waiting("comm_wait", 40), waiting("comm_wait", 5), waiting("comm_wait", 30)});
  ASSERT_TRUE(report.slowest);
  EXPECT_EQ(report.slowest->rank, 1);
  EXPECT_EQ(report.slowest->behind, 95'000 - 65'000);  // the others' median
  EXPECT_EQ(report.slowest->steps, 5);
  EXPECT_EQ(report.slowest->of, 5);
  // Steps that only one rank has compare nothing.
  const auto uneven = report_on({waiting("comm_wait", 0, 0, 2), waiting("comm_wait", 50, 0, 5)});
  EXPECT_EQ(uneven.slowest->of, 2);
}

TEST(TimelineAdvice, EachRuleHasItsThreshold) {
  struct Case {
    const char* rule;
    const char* text;  // of the remedy
    std::vector<Trace> reached, missed;
  };
  const auto gathers = [](double waits, int64_t bytes) {
    return steps(4, [=](Trace& trace, double begin) {
      trace.op("mm", begin, begin + 100 - waits).ours("comm_wait", begin + 100 - waits, begin + 100);
      trace.ours("unit_gather", begin + 50, begin + 100, bytes, "layer", 9);
    });
  };
  const auto reduces = [](double waits) {
    return steps(4, [=](Trace& trace, double begin) {
      trace.op("mm", begin, begin + 100 - waits).ours("comm_wait", begin + 100 - waits, begin + 100);
      trace.ours("gradient_reduce", begin + 50, begin + 100, 8 << 20, "bucket0", 9);
    });
  };
  // Results that the program gathers, and gradients beside them, for which it waits less.
  const auto values = [](double results, double gradients) {
    return steps(4, [=](Trace& trace, double begin) {
      const double end = begin + 100 - results;
      trace.op("mm", begin, end - gradients).ours("comm_wait", end - gradients, end);
      trace.ours("gradient_reduce", begin + 50, end, 1 << 10, "bucket0", 9);
      trace.ours("collective", end, begin + 100, 8, "gather_for_metrics");
    });
  };
  const auto fetches = [](int64_t count) {
    return steps(4, [=](Trace& trace, double begin) {
      trace.op("mm", begin, begin + 100);
      for (int64_t i = 0; i < count; ++i) trace.ours("unit_fetch", begin, begin + 1, 8, "layers.3", 9);
    });
  };
  const auto idle = [](double time) {
    return steps(4, [=](Trace& trace, double begin) { trace.op("mm", begin, begin + 100 - time); });
  };
  const auto first = [](double longer) {
    Trace trace;
    trace.profiler_step(0, 0, longer).op("mm", 0, longer);
    for (int i = 0; i < 4; ++i)
      trace.profiler_step(i + 1, longer + 100 * i, longer + 100 * i + 100)
          .op("mm", longer + 100 * i, longer + 100 * i + 100);
    return trace;
  };
  const Case cases[] = {
      {"data_wait", "num_workers", {waiting("loader_wait", 10)}, {waiting("loader_wait", 9.9)}},
      {"exposed_communication", "LocalSGD", {waiting("comm_wait", 10)}, {waiting("comm_wait", 9.9)}},
      {"exposed_communication", "backward_prefetch", {gathers(10, 8 << 20)}, {gathers(9.9, 8 << 20)}},
      {"exposed_communication", "communication hook", {reduces(10)}, {reduces(9.9)}},
      {"exposed_communication", "(10 %) is gather_for_metrics,", {values(10, 2)}, {values(9.9, 0)}},
      {"small_messages", "min_num_params", {gathers(10, 1 << 20)}, {gathers(10, (1 << 20) + 1)}},
      {"slowest_rank",
       "wait for rank 1",
       {waiting("comm_wait", 10), waiting("other", 0)},
       {waiting("comm_wait", 9.9), waiting("other", 0)}},
      {"weights_wait", "max_memory", {waiting("unit_wait", 10)}, {waiting("unit_wait", 9.9)}},
      {"fetch_thrash", "'layers.3' is fetched 3.0 times", {fetches(3)}, {fetches(2)}},
      {"checkpoint", "Save less often", {waiting("checkpoint_write", 10)}, {waiting("checkpoint_write", 9.9)}},
      {"other", "item()", {idle(30)}, {idle(29)}},
      {"first_step", "--skip_first", {first(200)}, {first(199)}},
  };
  for (const auto& [rule, text, reached, missed] : cases) {
    auto report = report_on(reached);
    ASSERT_THAT(rules_of(report), testing::Contains(rule)) << text;
    for (const auto& advice : report.advice)
      if (advice.rule == rule) {
        EXPECT_THAT(advice.text, HasSubstr(text));
        EXPECT_GE(advice.value, advice.threshold);
      }
    EXPECT_THAT(rules_of(report_on(missed)), testing::Not(testing::Contains(rule))) << text;
  }
  EXPECT_THAT(rules_of(report_on({waiting("comm_wait", 5), waiting("comm_wait", 5)})), IsEmpty());
  // Nobody waits for gradients: neither hooks nor larger buckets would help.
  const auto advice = report_on({values(20, 2)}).advice;
  ASSERT_EQ(advice.size(), 1u);
  EXPECT_THAT(advice[0].text, testing::Not(testing::AnyOf(HasSubstr("hook"), HasSubstr("bucket"))));
  // Where they wait for both, the advice is about the longer wait.
  EXPECT_THAT(report_on({values(20, 30)}).advice.at(0).text, HasSubstr("communication hook"));
}

TEST(TimelineMerge, PutsRanksOnOneClock) {
  auto first = Trace().op("mm", 1000, 1010).of(0, 2), second = Trace().op("mm", 500, 510).of(1, 2);
  first.head["baseTimeNanoseconds"] = 1'000'000'000;
  second.head["baseTimeNanoseconds"] = 1'000'700'000;  // 700 us later
  second.head["accelerate_clock"] = {{"offset_ns", -250'500}, {"error_ns", 10}};
  first.head["host_name"] = "one", second.head["host_name"] = "two";
  // An arrow of each, under one number; what belongs to the recording; names of processes and threads.
  for (auto* const trace : {&first, &second}) {
    trace->events.push_back(
        {{"ph", "s"}, {"id", 5}, {"name", "fwdbwd"}, {"cat", "fwdbwd"}, {"pid", 4711}, {"tid", 1}, {"ts", 1001}});
    trace->events.push_back({{"ph", "i"}, {"name", "Record Window End"}, {"pid", ""}, {"tid", ""}, {"ts", 1}});
    trace->events.push_back(
        {{"ph", "M"}, {"name", "process_name"}, {"pid", 4711}, {"tid", 0}, {"args", {{"name", "old"}}}});
    trace->events.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", 4711}, {"tid", 1}, {"ts", 1}, {"args", {{"name", "main"}}}});
  }
  const auto report = report_on({first, second}, "merge");
  const auto file = folder("merged") / "merged.json";
  merge(report, file);
  const auto merged = read(file);
  // Rank 1's event: 1000.7 ms + 0.5 ms - 0.2505 ms = 1000.9495 ms; rank 0's: 1001 ms.
  EXPECT_EQ(merged["baseTimeNanoseconds"], 1'000'949'500);
  std::map<int64_t, json> found;
  std::map<int64_t, std::string> names;
  std::map<int64_t, int64_t> ids, order;
  for (const auto& event : merged["traceEvents"]) {
    const int64_t pid = event["pid"];
    if (event["ph"] == "X") found[pid] = event;
    if (event["ph"] == "s") ids[pid] = event["id"];
    if (event["name"] == "process_name") names[pid] = event["args"]["name"];
    if (event["name"] == "process_sort_index") order[pid] = event["args"]["sort_index"];
    EXPECT_TRUE(event["pid"].is_number());
  }
  EXPECT_EQ(found[0]["ts"], 50.5);
  EXPECT_EQ(found[0]["dur"], 10);
  EXPECT_EQ(found[1]["ts"], 0);
  EXPECT_THAT(names, ElementsAre(std::pair(0, "rank 0 on one"), std::pair(1, "rank 1 on two")));
  EXPECT_LT(order[0], order[1]);
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_EQ(report.ranks[0].steps[0].begin, 50'500);
  EXPECT_EQ(report.ranks[1].steps[0].begin, 0);
  // The merged file is a trace, too.
  int64_t events = 0;
  read_trace(file, [&](const json&) { ++events; });
  EXPECT_EQ(events, 2 * (1 + 1 + 1 + 2));
}

TEST(TimelineMerge, DevicesOfARankAreItsNeighbours) {
  auto trace = Trace().op("mm", 0, 10).of(2, 3);
  trace.events.push_back(
      {{"ph", "s"}, {"id", 5}, {"name", "ac2g"}, {"cat", "ac2g"}, {"pid", 4711}, {"tid", 1}, {"ts", 1}});
  trace.events.push_back(
      {{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", 7}, {"args", {{"name", "stream 7"}}}});
  trace.pid = 1;
  trace.add("kernel", "gemm", 5, 9, 7);
  trace.events.push_back(
      {{"ph", "f"}, {"id", 5}, {"name", "ac2g"}, {"cat", "ac2g"}, {"pid", 1}, {"tid", 7}, {"ts", 5}});
  const auto in = folder("device");
  write(in / "profile_2.json", trace.text());
  merge(analyse(traces_in(in)), in / "merged.json");
  std::map<std::string, std::vector<int64_t>> pids;
  std::vector<std::string> names;
  const auto merged = read(in / "merged.json");
  for (const auto& event : merged["traceEvents"]) {
    pids[event["ph"].get<std::string>() + " " + event["name"].get<std::string>()].push_back(event["pid"]);
    if (event["name"] == "process_name") names.push_back(event["args"]["name"]);
  }
  EXPECT_EQ(pids["X aten::mm"], pids["s ac2g"]);
  EXPECT_EQ(pids["X gemm"], pids["f ac2g"]);
  EXPECT_EQ(pids["X gemm"], pids["M thread_name"]);
  EXPECT_NE(pids["X gemm"], pids["X aten::mm"]);
  EXPECT_THAT(names, ElementsAre("rank 2", "rank 2, GPU 1"));
}

TEST(TimelineReport, AsJsonAndText) {
  auto first = waiting("comm_wait", 20, 1 << 20, 30).of(0, 2), second = waiting("comm_wait", 0, 0, 30).of(1, 2);
  const auto report = report_on({first, second});
  const json found = to_json(report);
  EXPECT_EQ(found["version"], 1);
  EXPECT_EQ(found["overall"]["exposed_us"], 600);
  EXPECT_EQ(found["ranks"][0]["steps"].size(), 30);
  EXPECT_EQ(found["ranks"][0]["communication"][0],
            json({{"kind", "comm_wait"}, {"count", 30}, {"bytes", 30 << 20}, {"total_us", 600}, {"exposed_us", 600}}));
  EXPECT_EQ(found["ranks"][1]["operators"][0], json({{"name", "aten::mm"}, {"count", 30}, {"self_us", 3000}}));
  EXPECT_EQ(found["slowest"], json({{"rank", 1}, {"behind_us", 20}, {"steps", 30}, {"of", 30}}));
  for (const auto& rank : found["ranks"])
    for (const auto& step : rank["steps"]) {
      double sum = 0;
      for (const char* part : {"compute_us", "exposed_us", "data_us", "weights_us", "checkpoint_us", "other_us"})
        sum += step[part].get<double>();
      EXPECT_NEAR(sum, step["total_us"].get<double>(), 1e-9);
    }
  const auto text = to_text(report);
  EXPECT_THAT(text, HasSubstr("rank 0 (30 steps)           0.100          0.020      0.080      0.020"));
  EXPECT_THAT(text, HasSubstr("step 9 of rank 1"));
  EXPECT_THAT(text, testing::Not(HasSubstr("step 10 of rank")));
  EXPECT_THAT(text, HasSubstr("and 20 steps more"));
  // The advice comes before them.
  EXPECT_LT(text.find("What to do:"), text.find("step 0 of rank 0"));
  EXPECT_THAT(text,
              HasSubstr("The slowest rank is 1: 0.020 ms per step more than the others, the slowest in 30 of 30"));
}

TEST(TimelineReport, NothingFromATraceIsAliveInThePage) {
  const auto report = report_on({Trace().op("</script><script>alert(1)</script>", 0, 10).of(0, 1)});
  const auto page = to_html(report, "<b>title</b>");
  EXPECT_THAT(page, HasSubstr("aten::\\u003c/script>"));
  EXPECT_THAT(page, testing::Not(HasSubstr("<b>title")));
  EXPECT_THAT(page, testing::Not(HasSubstr("REPORT_JSON")));
}

}  // namespace
