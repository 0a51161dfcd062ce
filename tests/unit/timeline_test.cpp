// Reading traces, and what a rank did in them.
#include <gmock/gmock.h>

#include <random>

#include "accelerate/utils/error.hpp"
#include "input/json.hpp"
#include "message_of.hpp"
#include "timeline/activity.hpp"
#include "timeline/spans.hpp"
#include "timeline/trace_file.hpp"
#include "timeline_support.hpp"

namespace {

using namespace accelerate::timeline;
using namespace timeline_test;
using accelerate::CheckpointError;
using testing::ElementsAre;
using testing::HasSubstr;

MATCHER_P2(IsSpan, begin, end, "") { return arg.begin == begin && arg.end == end; }

TEST(TimelineSpans, AgreeWithCountingMomentByMoment) {
  std::mt19937 random(7);
  for (int round = 0; round < 500; ++round) {
    const auto draw = [&] {
      Spans spans;
      for (uint32_t i = random() % 8; i > 0; --i) {
        const int64_t begin = random() % 40;
        spans.push_back({begin, begin + static_cast<int64_t>(random() % 10)});
      }
      return spans;
    };
    const Spans first = draw(), second = draw();
    const auto covers = [](const Spans& spans, int64_t moment) {
      return std::any_of(spans.begin(), spans.end(),
                         [&](const TimeSpan& span) { return span.begin <= moment && moment < span.end; });
    };
    const Spans both = united(first), cut = without(both, united(second));
    const TimeSpan window{5, 5 + static_cast<int64_t>(random() % 30)};
    int64_t counted = 0;
    for (int64_t moment = 0; moment < 60; ++moment) {
      ASSERT_EQ(covers(both, moment), covers(first, moment));
      ASSERT_EQ(covers(cut, moment), covers(first, moment) && !covers(second, moment));
      counted += covers(both, moment) && moment >= window.begin && moment < window.end ? 1 : 0;
    }
    ASSERT_EQ(length_within(both, window), counted);
    ASSERT_EQ(length(both), length_within(both, {0, 60}));
    for (size_t i = 1; i < both.size(); ++i) ASSERT_LT(both[i - 1].end, both[i].begin);
  }
}

/// All that parse_json_stream() gives away of a text that comes in pieces of this size.
std::pair<json, std::string> in_pieces(const std::string& text, size_t size, const std::string& list = "list") {
  json found{{"elements", json::array()}, {"members", json::array()}};
  size_t at = 0;
  const auto problem = accelerate::parse_json_stream(
      {.more =
           [&] {
             const auto piece = std::string_view(text).substr(at, size);
             at += piece.size();
             return piece;
           },
       .list = list,
       .take_element = [&](json& element) { found["elements"].push_back(std::move(element)); },
       .take_member =
           [&](const std::string& name, const json& value) {
             found["members"].push_back({name, value});
           }});
  return {found, problem};
}

TEST(JsonStream, GivesElementsAndMembersAway) {
  const json list = {
      1, {{"list", {2}}, {"deep", {{"er", "ü\n\"{["}}}}, json::array({json::array({3}), {}}), "x", nullptr};
  const json whole{{"a", {{"list", {9}}}}, {"list", list}, {"z", 1.5}};
  const json expected{{"elements", list},
                      {"members", json::parse(R"([["a", {"list": [9]}], ["list", []], ["z", 1.5]])")}};
  for (const size_t size : {1, 2, 3, 7, 1000}) {
    const auto [found, problem] = in_pieces(whole.dump(2), size);
    EXPECT_EQ(problem, "");
    EXPECT_EQ(found, expected) << size;
  }
  EXPECT_EQ(in_pieces(R"({"list": 3})", 4).first["members"], json::parse(R"([["list", 3]])"));
  EXPECT_EQ(in_pieces(R"({"list": {"a": [1]}})", 4).first["elements"], json::array());
  EXPECT_EQ(in_pieces("{}", 1).second, "");
}

TEST(JsonStream, SaysWhatIsWrong) {
  EXPECT_THAT(in_pieces("[1, 2]", 2).second, HasSubstr("is not a JSON object"));
  EXPECT_THAT(in_pieces("", 2).second, HasSubstr("is not valid JSON"));
  for (const size_t size : {1, 3, 100}) {
    EXPECT_THAT(in_pieces(R"({"list": [1, 2)", size).second, HasSubstr("is not valid JSON"));
    EXPECT_THAT(in_pieces(R"({"list": [1]} x)", size).second, HasSubstr("is not valid JSON"));
    EXPECT_THAT(in_pieces("{\"list\": [\"\xff\"]}", size).second, HasSubstr("is not valid UTF-8"));
    EXPECT_THAT(in_pieces(std::string("{\"list\": [1]}\0, 5", 18), size).second, HasSubstr("a NUL byte"));
    EXPECT_THAT(in_pieces("{\"list\": [" + std::string(200, '['), size).second, HasSubstr("nested deeper than 64"));
  }
}

TEST(JsonStream, MayHaveAnyNumberOfElementsButNoneThatIsTooLarge) {
  std::string text = "{\"list\": [[]";
  for (int i = 0; i < 600'000; ++i) text += ",[]";
  const auto [found, problem] = in_pieces(text + "]}", 1 << 16);
  EXPECT_EQ(problem, "");
  EXPECT_EQ(found["elements"].size(), 600'001);
  const auto [of_one, too_large] = in_pieces("{\"list\": [" + text.substr(9) + "]]}", 1 << 16);
  EXPECT_THAT(too_large, HasSubstr("more values than text of its length can mean"));
}

Activity activity_of(const Trace& trace) {
  ActivityReader reader;
  for (const auto& event : trace.events) reader.add(event);
  return reader.finish();
}

constexpr int64_t kUs = 1000;

TEST(Activity, TheInnermostEventSaysWhatAThreadDoes) {
  const auto found = activity_of(Trace()
                                     .op("linear", 0, 100)
                                     .op("addmm", 10, 90)  // within it
                                     .ours("comm_wait", 20, 50, 64)
                                     .op("copy_", 30, 40)  // an operator computes, also within communication
                                     .add("user_annotation", "my scope", 60, 70)
                                     .op("relu", 120, 130));
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(0, 20 * kUs), IsSpan(30 * kUs, 40 * kUs), IsSpan(50 * kUs, 100 * kUs),
                                         IsSpan(120 * kUs, 130 * kUs)));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(20 * kUs, 30 * kUs), IsSpan(40 * kUs, 50 * kUs)));
  EXPECT_THAT(found.communication, ElementsAre(IsSpan(20 * kUs, 50 * kUs)));
  ASSERT_EQ(found.operators.size(), 4);
  EXPECT_EQ(found.operators[0].name, "aten::addmm");
  EXPECT_EQ(found.operators[0].self, 50 * kUs);
  EXPECT_EQ(found.operators[1].name, "aten::linear");
  EXPECT_EQ(found.operators[1].self, 20 * kUs);
  EXPECT_EQ(found.operators[1].count, 1);
  ASSERT_EQ(found.exchanges.size(), 1);
  EXPECT_EQ(found.exchanges[0].kind, "comm_wait");
  EXPECT_EQ(found.exchanges[0].bytes, 64);
  EXPECT_EQ(length(found.exchanges[0].exposed), 20 * kUs);
}

TEST(Activity, EventsThatBeginTogetherLieInEachOther) {
  const auto found = activity_of(Trace()
                                     .ours("comm_wait", 0, 20)
                                     .op("mm", 0, 40)
                                     .op("linear", 0, 100)
                                     .op("late", 90, 130)  // ends after what it begins in, which ends there
                                     .op("next", 120, 140));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(0, 20 * kUs)));
  std::map<std::string, int64_t> self;
  for (const auto& op : found.operators) self[op.name] = op.self / kUs;
  EXPECT_THAT(self, ElementsAre(std::pair("aten::late", 30), std::pair("aten::linear", 50), std::pair("aten::mm", 20),
                                std::pair("aten::next", 20)));
}

/// The profiler's clock and ours differ by nanoseconds.
TEST(Activity, AnOperatorThatSeemsToEndWithinTheNextScopeDoesNotHoldIt) {
  const auto found = activity_of(Trace().op("view", 0, 21).ours("comm_wait", 20, 180).op("add", 179, 200));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(20 * kUs, 179 * kUs)));
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(0, 20 * kUs), IsSpan(179 * kUs, 200 * kUs)));
}

TEST(Activity, WhatGoesOnBehindAThreadThatWorksIsNotExposed) {
  Trace trace;
  trace.op("mm", 0, 40).ours("comm_wait", 60, 70);
  trace.ours("gradient_reduce", 10, 70, 1 << 20, "bucket0", 9);  // the program's own code runs from 40 to 60
  const auto found = activity_of(trace);
  EXPECT_THAT(found.communication, ElementsAre(IsSpan(10 * kUs, 70 * kUs)));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(60 * kUs, 70 * kUs)));
}

TEST(Activity, WithoutOurScopesCommunicationIsExposedWhileNoOperatorRuns) {
  Trace trace;
  trace.op("mm", 0, 40).op("mm", 60, 65).add("user_annotation", "gloo:all_reduce", 10, 70, 9);
  trace.add("cpu_op", "c10d::allreduce_", 5, 8).add("cpu_op", "c10d::barrier", 75, 80);  // start it, and no more
  const auto found = activity_of(trace);
  EXPECT_FALSE(found.knows_waits);
  EXPECT_THAT(found.communication, ElementsAre(IsSpan(10 * kUs, 70 * kUs)));
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(0, 40 * kUs), IsSpan(60 * kUs, 65 * kUs)));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(40 * kUs, 60 * kUs), IsSpan(65 * kUs, 70 * kUs)));
  ASSERT_EQ(found.exchanges.size(), 1);  // that of the transport, which knows when it began and ended
  EXPECT_EQ(found.exchanges[0].kind, "gloo:all_reduce");
}

TEST(Activity, OnlyThreadsThatTrainCompute) {
  Trace trace;
  trace.op("mm", 0, 10).ours("comm_wait", 10, 50);
  trace.op("stack", 20, 30, 2);                                                        // of a loader's worker
  trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 40, 45, 3);  // of the backward
  const auto found = activity_of(trace);
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(0, 10 * kUs), IsSpan(40 * kUs, 45 * kUs)));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(10 * kUs, 40 * kUs), IsSpan(45 * kUs, 50 * kUs)));
}

TEST(Activity, WaitingForDataAndCheckpointsHoldsWhatIsDoneForThem) {
  const auto found = activity_of(Trace()
                                     .ours("loader_wait", 0, 40)
                                     .op("stack", 10, 20)
                                     .ours("comm_wait", 20, 30)
                                     .ours("checkpoint_write", 50, 80, 1000)
                                     .op("copy_", 60, 70)
                                     .op("stack", 90, 95));
  EXPECT_THAT(found.data, ElementsAre(IsSpan(0, 40 * kUs)));
  EXPECT_THAT(found.checkpoint, ElementsAre(IsSpan(50 * kUs, 80 * kUs)));
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(90 * kUs, 95 * kUs)));
  EXPECT_EQ(length(found.exposed), 0);
  ASSERT_EQ(found.operators.size(), 1);  // work for others is not the program's computation
  EXPECT_EQ(found.operators[0].self, 5 * kUs);
}

TEST(Activity, AUnitIsWaitedForOnOtherRanksOrInMemory) {
  const auto found = activity_of(Trace()
                                     .op("linear", 0, 100)
                                     .ours("unit_wait", 10, 20, 0, "far")
                                     .ours("unit_gather", 5, 20, 4096, "far", 2)
                                     .ours("unit_wait", 30, 45, 0, "near")
                                     .ours("unit_fetch", 50, 60, 4096, "near")
                                     .op("copy_", 52, 58)
                                     .ours("unit_fetch", 70, 80, 4096, "near"));
  EXPECT_THAT(found.exposed, ElementsAre(IsSpan(10 * kUs, 20 * kUs)));
  EXPECT_THAT(found.weights,
              ElementsAre(IsSpan(30 * kUs, 45 * kUs), IsSpan(50 * kUs, 60 * kUs), IsSpan(70 * kUs, 80 * kUs)));
  EXPECT_EQ(found.fetches.at("near"), 2);
}

TEST(Activity, KernelsComputeWhereThereAreSome) {
  Trace trace;
  trace.op("mm", 0, 100).ours("comm_wait", 0, 5);
  trace.pid = 0;
  trace.add("kernel", "gemm", 30, 60, 7).add("kernel", "ncclDevKernel_AllReduce_Sum_f32(ncclArgs)", 50, 80, 20);
  trace.add("gpu_memcpy", "Memcpy HtoD", 10, 20, 7);
  const auto found = activity_of(trace);
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(30 * kUs, 60 * kUs)));
  EXPECT_THAT(found.exposed, testing::Contains(IsSpan(60 * kUs, 80 * kUs)));
  EXPECT_EQ(found.devices, std::set<int64_t>{0});
  ASSERT_EQ(found.operators.size(), 1);
  EXPECT_EQ(found.operators[0].name, "gemm");
  EXPECT_EQ(found.exchanges[0].kind, "ncclDevKernel_AllReduce_Sum_f32");
}

TEST(Activity, EventsThatAreNotWholeAreLeftOut) {
  Trace trace;
  trace.op("mm", 0, 10);
  for (const char* text :
       {R"({})", R"([1])", R"("x")", R"({"ph": "X", "name": 3, "ts": 1, "dur": 1, "pid": 1, "tid": 1})",
        R"({"ph": "X", "name": "a", "cat": "cpu_op", "ts": "1", "dur": 1, "pid": 1, "tid": 1})",
        R"({"ph": "X", "name": "a", "cat": "cpu_op", "ts": 1, "dur": 1, "pid": "Spans", "tid": 1})",
        R"({"ph": "X", "name": "a", "cat": "cpu_op", "ts": 1e300, "dur": 1e300, "pid": 1.5, "tid": 1})"})
    trace.events.push_back(json::parse(text));
  // Nonsense of the right types overflows nothing.
  trace.add("cpu_op", "aten::odd", 3, 3).events.back()["dur"] = 1e300;
  const auto found = activity_of(trace);
  EXPECT_THAT(found.compute, ElementsAre(IsSpan(0, 10 * kUs)));
}

TEST(TraceFile, ReadsWhatTheHeadSays) {
  Trace trace;
  trace.op("mm", 1.5, 2.25).of(3, 4);
  trace.head["baseTimeNanoseconds"] = 1790857026000000000;
  trace.head["host_name"] = "one";
  trace.head["accelerate_clock"] = {{"offset_ns", -1500}, {"error_ns", 20}};
  trace.head["accelerate_steps"] = {{{"step", 7}, {"begin_us", 1.5}, {"end_us", 2}}};
  int64_t events = 0;
  const auto head = read_trace(write(folder("head") / "profile_0.json", trace.text()), [&](const json& event) {
    const auto found = lasting(event);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->begin, 1500);
    EXPECT_EQ(found->end, 2250);
    ++events;
  });
  EXPECT_EQ(events, 1);
  EXPECT_EQ(head.rank, 3);
  EXPECT_TRUE(head.knows_rank);
  EXPECT_EQ(head.world_size, 4);
  EXPECT_EQ(head.backend, "gloo");
  EXPECT_EQ(head.host, "one");
  EXPECT_EQ(head.base, 1790857026000000000);
  EXPECT_TRUE(head.knows_clock);
  EXPECT_EQ(head.clock_offset, -1500);
  EXPECT_EQ(head.clock_error, 20);
  ASSERT_EQ(head.steps.size(), 1);
  EXPECT_EQ(head.steps[0].number, 7);
  EXPECT_EQ(head.steps[0].begin, 1500);
  EXPECT_EQ(head.steps[0].end, 2000);
}

TEST(TraceFile, SaysWhatIsWrongWithAFile) {
  const auto in = folder("wrong");
  const auto problem = [&](const std::string& name, const std::string& text) {
    const auto file = write(in / name, text);
    return support::message_of<CheckpointError>([&] { read_trace(file, [](const json&) {}); });
  };
  const auto whole = Trace().op("mm", 0, 1).text();
  EXPECT_THAT(problem("profile_0.json", whole.substr(0, whole.size() - 3)),
              testing::AllOf(HasSubstr("profile_0.json': it is not valid JSON"), HasSubstr("stopped while it writes")));
  EXPECT_THAT(problem("profile_0.json", ""), HasSubstr("It is empty: the program ended before"));
  EXPECT_THAT(problem("profile_0.json.gz", "\x1f\x8b\x08"), HasSubstr("it is compressed and"));
  EXPECT_THAT(problem("profile_0.json", "{\"a\": 1}"), HasSubstr("it has no list traceEvents"));
  EXPECT_THAT(problem("profile_0.json", "{\"traceEvents\": {}}"), HasSubstr("it has no list traceEvents"));
  EXPECT_THAT(problem("profile_0.json", "[]"), HasSubstr("it is not a JSON object"));
  EXPECT_THAT(problem("profile_0.json", R"({"traceEvents": [], "accelerate_clock": {"offset_ns": "1"}})"),
              HasSubstr("accelerate_clock has"));
  EXPECT_THAT(problem("profile_0.json", R"({"distributedInfo": {"rank": -1}, "traceEvents": []})"),
              HasSubstr("distributedInfo has -1, expected a rank"));
  EXPECT_THAT(problem("profile_0.json", R"({"baseTimeNanoseconds": -1, "traceEvents": []})"),
              HasSubstr("baseTimeNanoseconds has -1"));
  EXPECT_THAT(problem("profile_0.json", R"({"traceEvents": [], "accelerate_steps": [{"step": 1}]})"),
              HasSubstr("accelerate_steps has"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { read_trace(in / "none.json", [](const json&) {}); }),
              HasSubstr("No such file"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { read_trace(in, [](const json&) {}); }),
              HasSubstr("it is a folder"));
}

TEST(TraceFile, AFoldersTracesComeByRank) {
  const auto in = folder("several");
  EXPECT_THAT(support::message_of<CheckpointError>([&] { traces_in(in); }), HasSubstr("found no trace among 0 files"));
  EXPECT_THAT(support::message_of<CheckpointError>([&] { traces_in(in / "none"); }),
              HasSubstr("can't read the folder"));
  write(in / "profile_0.json.gz", "");
  EXPECT_THAT(support::message_of<CheckpointError>([&] { traces_in(in); }), HasSubstr("Unpack them by gunzip"));
  write(in / "b_1.2.pt.trace.json", ""), write(in / "a_1.2.pt.trace.json", "");
  EXPECT_THAT(traces_in(in), ElementsAre(in / "a_1.2.pt.trace.json", in / "b_1.2.pt.trace.json"));
  for (const char* name : {"profile_10.json", "profile_9.json", "profile_x.json", "merged.json", "profile_.json"})
    write(in / name, "");
  EXPECT_THAT(traces_in(in), ElementsAre(in / "profile_9.json", in / "profile_10.json"));
}

}  // namespace
