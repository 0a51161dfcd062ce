#include "observe/trace.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <optional>

#include "message_of.hpp"
#include "profiler/trace_file.hpp"
#include "residency/homes/host.hpp"
#include "residency/residency.hpp"
#include "residency/worker.hpp"
#include "scratch.hpp"

using namespace accelerate;
using namespace accelerate::trace;

namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<std::string> names(const Recording& recording) {
  std::vector<std::string> names;
  for (const auto& event : recording.events) names.push_back(event.name);
  return names;
}

TEST(Trace, SpansAreKeptWhileSomebodyRecords) {
  std::optional<Span> early;
  early.emplace(SpanKind::unit_wait, "before");
  Recording outer, inner;
  {
    Recorder first;
    early.emplace(SpanKind::unit_wait, "across");  // ends the one before, of which nobody wanted to know
    Recorder second;
    early.reset();
    {
      Span late(SpanKind::checkpoint_write, "a file.bin");
      late.set_bytes(7);
      Span moved = std::move(late);
      Span nothing(SpanKind::unit_wait, "nothing");
      nothing.cancel();
    }
    const Span open(SpanKind::loader_wait, "open");
    inner = second.stop();
    outer = first.stop();
  }
  EXPECT_THAT(names(inner), ElementsAre("accelerate::checkpoint_write a_file.bin bytes=7"));
  EXPECT_THAT(names(outer),
              ElementsAre("accelerate::unit_wait across bytes=0", "accelerate::checkpoint_write a_file.bin bytes=7"));
  EXPECT_LE(outer.events[0].begin_ns, outer.events[0].end_ns);
  EXPECT_FALSE(recording());
}

TEST(Trace, TopicsNameWhatIsStartedWithin) {
  EXPECT_FALSE(label_of("reduce", 3)) << "nobody records";
  Recorder recorder;
  EXPECT_EQ(label_of("reduce", 3)->subject, "reduce");
  {
    const Topic unit(SpanKind::unit_gather, "h.0", 12);
    const Topic bucket(SpanKind::gradient_reduce, "bucket", 34, 5);
    EXPECT_EQ(label_of("reduce", 3)->subject, "bucket5");
    EXPECT_EQ(label_of("reduce", 3)->bytes, 34);
    EXPECT_EQ(label_of("reduce", 3)->kind, SpanKind::gradient_reduce);
  }
  EXPECT_EQ(label_of("reduce", 3)->kind, SpanKind::collective);
}

TEST(Trace, OfSeveralOptimizersTheOneThatStepsMostCounts) {
  const int one = 0, other = 0;
  Recorder recorder;
  int64_t number = 0;
  for (int i = 0; i < 3; ++i) {
    step_done(++number, &one);
    step_done(number, &other);
  }
  step_done(number, &other);
  std::vector<int64_t> numbers;
  const auto steps = recorder.stop().steps;
  for (const auto& step : steps) numbers.push_back(step.number);
  EXPECT_THAT(numbers, ElementsAre(1, 2, 3, 3));
  EXPECT_EQ(steps[0].end_ns, steps[1].begin_ns);
}

TEST(Trace, UnitsAreFetchedWaitedForAndEvicted) {
  auto weight = torch::full({64}, 2.0);
  residency::PartSpec part;
  part.layout = residency::lay_out({weight});
  part.home = residency::host_home(weight.clone(), std::make_shared<residency::Worker>());
  part.members = {{"weight", weight}};
  std::vector<residency::PartSpec> parts;
  parts.push_back(std::move(part));
  residency::Residency engine({.prefetch = 0});
  auto& unit = engine.add("h.0", std::move(parts));
  const auto use = [&] {
    EXPECT_EQ(torch::sum(weight).item<double>(), 128);
    engine.evict(unit);
  };
  Recorder recorder;
  use();
  const auto events = recorder.stop().events;
  ASSERT_EQ(events.size(), 3);
  const auto &fetch = events[0], &wait = events[1], &evict = events[2];
  EXPECT_EQ(fetch.name, "accelerate::unit_fetch h.0 bytes=256");
  EXPECT_EQ(wait.name, "accelerate::unit_wait h.0 bytes=256");
  EXPECT_EQ(evict.name, "accelerate::unit_evict h.0 bytes=256");
  EXPECT_NE(fetch.system_thread, wait.system_thread) << "the worker copies";
  EXPECT_LE(fetch.end_ns, wait.end_ns);
  EXPECT_LE(wait.end_ns, evict.begin_ns);
  Recorder idle;
  EXPECT_THAT(idle.stop().events, IsEmpty());
}

/// The ends of files as Kineto of two versions writes them; what stands between is the same.
TEST(Trace, FilesOfTwoKinetosAreCompleted) {
  const Recording recording{
      .events = {{.name = "accelerate::collective gather bytes=8", .begin_ns = 1'000'002'000, .end_ns = 1'000'005'000}},
      .steps = {{.number = 4, .begin_ns = 1'000'001'000, .end_ns = 1'000'009'500}}};
  const std::string
      head = "\n  {\n    \"schemaVersion\": 1,\n  \"baseTimeNanoseconds\": 1000000000,\n  \"traceEvents\": [\n",
      event = "  {\n    \"ph\": \"X\", \"name\": \"aten::ones\", \"args\": {\"a\": [1]}\n  }\n  ],";
  const auto file = support::scratch("trace.json");
  for (const char* end : {"\"traceName\": \"x\" }", "\n  \"WARNING\": [\"a ],b\"],\n  \"traceName\": \"x\"\n}"}) {
    std::ofstream(file) << head << event << end;
    profiler::complete_trace(file, recording, {{"accelerate_clock", 5}});
    const auto trace = nlohmann::json::parse(std::ifstream(file));
    EXPECT_EQ(trace["traceName"], "x");
    EXPECT_EQ(trace["accelerate_clock"], 5);
    EXPECT_EQ(trace["traceEvents"][0]["name"], "aten::ones");
    EXPECT_EQ(trace["traceEvents"][1]["name"], "accelerate::collective gather bytes=8");
    EXPECT_EQ(trace["traceEvents"][1]["ts"], 2.0);
    EXPECT_EQ(trace["traceEvents"][1]["dur"], 3.0);
    EXPECT_EQ(trace["accelerate_steps"][0]["end_us"], 9.5);
  }
  std::ofstream(file) << head << "]}";
  EXPECT_THAT(support::message_of<InternalError>([&] { profiler::complete_trace(file, recording, {}); }),
              ::testing::HasSubstr("has no end of traceEvents"));
}

}  // namespace
