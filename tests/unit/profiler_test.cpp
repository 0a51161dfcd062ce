#include "accelerate/profiler.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "accelerate/accelerator.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "python.hpp"
#include "scratch.hpp"

using namespace accelerate;

namespace {

using nlohmann::json;
using support::message_of;
using support::scratch;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::vector<std::string> kCpu = {"cpu"};

/// The operators that profiler_peer.py runs, too.
void forward_and_backward() {
  const auto x = torch::ones({4, 3, 8, 8}), w = torch::full({5, 3, 3, 3}, 0.1, torch::requires_grad());
  const auto y =
      at::conv2d(x, w, at::Tensor(), at::IntArrayRef({1, 1}), at::IntArrayRef({0, 0}), at::IntArrayRef({1, 1})).relu();
  const auto z = torch::matmul(y.flatten(1), torch::full({180, 7}, 0.1));
  (z * z).sum().backward(torch::ones({}));
}

json read_json(const std::filesystem::path& file) { return json::parse(std::ifstream(file)); }

json peer(const std::vector<std::string>& arguments) {
  auto all = arguments;
  all.push_back(scratch("peer.json").string());
  const auto result = support::run_python("tests/unit/profiler_peer.py", all);
  EXPECT_EQ(result.exit_code, 0) << result.output;
  return result.exit_code == 0 ? read_json(all.back()) : json();
}

const ProfileAverage& row(const ProfileAverages& rows, const std::string& key) {
  for (const auto& one : rows)
    if (one.key == key) return one;
  throw std::runtime_error("no row " + key);
}

/// The events that were recorded of `work`.
template <class F> ProfileEvents recorded(ProfileKwargs kwargs, const F& work) {
  kwargs.activities = kCpu;
  Profile profile(std::move(kwargs));
  work();
  profile.stop();
  return profile.events();
}

TEST(Profile, TablesArePyTorchsToTheLetter) {
  SKIP_WITHOUT_PYTHON();
  auto found = recorded({.record_shapes = true, .profile_memory = true, .with_flops = true}, [] {
    for (int i = 0; i < 3; ++i) {
      RECORD_USER_SCOPE("a scope");
      forward_and_backward();
    }
  });
  // Stacks as TorchScript has them: a few lines, one of them long.
  json given = {{"events", json::array()}};
  for (auto& e : found.events) {
    if (e.name == "aten::ones") e.stack = {"model.py(12): forward of the longest name", "main.py(3): <module>", "x"};
    given["events"].push_back({{"id", e.id},
                               {"name", e.name},
                               {"thread", e.thread},
                               {"start_us", e.start_us},
                               {"end_us", e.end_us},
                               {"forward_thread", e.forward_thread},
                               {"input_shapes", e.input_shapes},
                               {"stack", e.stack},
                               {"is_backward", e.is_backward},
                               {"cpu_memory_usage", e.cpu_memory_usage},
                               {"is_async", e.is_async},
                               {"sequence_number", e.sequence_number},
                               {"flops", e.flops},
                               {"is_user_annotation", e.is_user_annotation}});
  }
  std::ofstream(scratch("events.json")) << given;
  const auto theirs = peer({"tables", scratch("events.json").string()});
  const auto averages = found.key_averages();
  EXPECT_EQ(averages.table(), theirs["plain"]);
  EXPECT_EQ(
      averages.table({.sort_by = "self_cpu_time_total", .row_limit = 5, .header = "The slowest", .time_unit = "ms"}),
      theirs["sorted"]);
  EXPECT_EQ(averages.table({.sort_by = "count", .row_limit = -1, .max_name_column_width = 14, .time_unit = "s"}),
            theirs["narrow"]);
  EXPECT_EQ(found.key_averages(true).table({.sort_by = "flops", .max_shapes_column_width = 18, .time_unit = "us"}),
            theirs["shapes"]);
  EXPECT_EQ(found.key_averages(false, 2).table({.sort_by = "cpu_memory_usage", .max_src_column_width = 12}),
            theirs["stacks"]);
  EXPECT_EQ(averages.table({.sort_by = "cpu_time", .top_level_events_only = true}), theirs["top"]);
  EXPECT_EQ(found.table({.row_limit = 20, .top_level_events_only = true}), theirs["calls"]);
  EXPECT_DOUBLE_EQ(found.total_average().cpu_time_total, theirs["total"].get<double>());
  EXPECT_THAT(message_of<ConfigError>([&] { averages.table({.sort_by = "cpu_tme"}); }), HasSubstr("cpu_tme"));
  EXPECT_THAT(message_of<ConfigError>([&] { averages.table({.time_unit = "h"}); }), HasSubstr("s, ms or us"));
}

TEST(Profile, CountsFlopsAndBytesArePyTorchs) {
  SKIP_WITHOUT_PYTHON();
  const auto found =
      recorded({.record_shapes = true, .profile_memory = true, .with_flops = true}, forward_and_backward);
  json ours;
  for (const auto& one : found.key_averages(true))
    ours[one.key + " " + one.input_shapes] = {one.count, one.flops, one.cpu_memory_usage, one.self_cpu_memory_usage};
  const auto theirs = peer({"operators"});
  // Python frees tensors at other places, outside of operators: only what operators do is compared.
  for (const auto& [key, value] : theirs.items())
    if (!key.starts_with("[memory]")) {
      EXPECT_EQ(ours[key], value) << key;
    }
  EXPECT_GT(row(found.key_averages(), "aten::conv2d").flops, 0);
}

TEST(Profile, SchedulesRecordWhatPyTorchsRecord) {
  SKIP_WITHOUT_PYTHON();
  const std::vector<std::map<std::string, int64_t>> cases = {
      {{"wait", 1}, {"warmup", 1}, {"active", 2}},
      {{"wait", 5}, {"warmup", 1}, {"active", 3}, {"repeat", 2}, {"skip_first", 2}},
      {{"wait", 0}, {"warmup", 0}, {"active", 1}, {"repeat", 3}},
      {{"wait", 0}, {"warmup", 1}, {"active", 4}, {"repeat", 1}, {"skip_first", 4}},
      {{"wait", 3}, {"warmup", 2}, {"active", 1}, {"skip_first", 1}, {"skip_first_wait", 1}},
      {{"wait", 10}, {"warmup", 2}, {"active", 8}}};
  json ours = json::array();
  for (const auto& option : cases) {
    json ready = json::array();
    Profile profile({.activities = kCpu, .schedule_option = option, .on_trace_ready = [&](Profile& p) {
                       ready.push_back({p.step_num(), 0});
                       for (const auto& e : p.events().events)
                         ready.back()[1] = ready.back()[1].get<int>() + (e.name == "ProfilerStep*");
                     }});
    for (int i = 0; i < 14; ++i) {
      torch::ones(2);
      profile.step();
    }
    profile.stop();
    ours.push_back(ready);
  }
  std::ofstream(scratch("cases.json")) << json(cases);
  EXPECT_EQ(ours, peer({"schedules", scratch("cases.json").string()}));
}

TEST(Profile, RecordsWhatIsAskedForAndNoMore) {
  const auto plain = recorded({}, forward_and_backward);
  for (const auto& e : plain.events) {
    EXPECT_THAT(e.input_shapes, IsEmpty());
    EXPECT_EQ(e.flops, 0);
    EXPECT_EQ(e.cpu_memory_usage, 0);
  }
  EXPECT_THAT(plain.key_averages().table(), AllOf(Not(HasSubstr("CPU Mem")), Not(HasSubstr("FLOPs"))));
  EXPECT_THAT(recorded({.record_shapes = true}, forward_and_backward).events,
              AllOf(Contains(Field(&ProfileEvent::input_shapes, Not(IsEmpty()))),
                    ::testing::Each(Field(&ProfileEvent::flops, 0))));  // which shapes would tell
  EXPECT_THAT(recorded({.profile_memory = true}, forward_and_backward).key_averages().table(), HasSubstr("CPU Mem"));
  EXPECT_THAT(recorded({.with_flops = true}, forward_and_backward).key_averages().table(), HasSubstr("FLOPs"));
}

TEST(Profile, StacksAndModulesOfTorchScript) {
  torch::jit::Module module("Doubler");
  module.define("def forward(self, x):\n  return torch.matmul(x, x)\n");
  const auto input = torch::ones({200, 200});
  const auto run = [&] {
    for (int i = 0; i < 3; ++i) module.forward({input});
  };
  run();
  const auto has_stack = Contains(Field(&ProfileEvent::stack, Not(IsEmpty())));
  const auto has_module = Contains(Field(&ProfileEvent::module_hierarchy, Not(IsEmpty())));
  EXPECT_THAT(recorded({}, run).events, AllOf(Not(has_stack), Not(has_module)));
  EXPECT_THAT(recorded({.with_modules = true}, run).events, has_module);

  Profile profile({.activities = kCpu, .with_stack = true});
  run();
  profile.stop();
  EXPECT_THAT(profile.events().events, Contains(Field(&ProfileEvent::stack, Contains(HasSubstr("(2): forward")))));
  profile.export_stacks(scratch("stacks.txt"));
  std::stringstream text;
  text << std::ifstream(scratch("stacks.txt")).rdbuf();
  EXPECT_THAT(text.str(), ::testing::ContainsRegex("forward[^ ]* [0-9]+\n"));
  EXPECT_THAT(message_of<ConfigError>([&] { profile.export_stacks(scratch("x"), "count"); }), HasSubstr("count"));
}

TEST(Profile, TheAcceleratorWritesTheTraceOfItsRank) {
  const auto folder = scratch("traces");
  Accelerator accelerator(
      {.cpu = true, .kwargs_handlers = {ProfileKwargs{.activities = kCpu, .output_trace_dir = folder.string()}}});
  {
    auto profile = accelerator.profile();
    forward_and_backward();
  }
  const auto trace = read_json(folder / "profile_0.json");
  std::set<std::string> names;
  for (const auto& e : trace["traceEvents"]) names.insert(e.value("name", ""));
  EXPECT_TRUE(names.contains("aten::conv2d"));
  // Others for this one, and a file that was written before is copied.
  auto profile = accelerator.profile(ProfileKwargs{.activities = kCpu});
  torch::ones(2);
  profile.stop();
  profile.export_chrome_trace(scratch("a.json"));
  profile.export_chrome_trace(scratch("b.json"));
  EXPECT_EQ(read_json(scratch("a.json")), read_json(scratch("b.json")));
  EXPECT_THROW(profile.export_chrome_trace(scratch("no") / "folder.json"), ResourceError);
}

TEST(Profile, RefusesWhatItCannotDo) {
  const auto refusal = [](ProfileKwargs kwargs) {
    return message_of<ConfigError>([&] { Profile profile(std::move(kwargs)); });
  };
  EXPECT_THAT(refusal({.activities = {{"gpu"}}}), HasSubstr("activities has 'gpu', expected cpu, cuda"));
  EXPECT_THAT(refusal({.activities = {{"mtia"}}}), HasSubstr("at least one that is there"));
  EXPECT_THAT(refusal({.schedule_option = {{{"wait", 1}, {"warmup", 1}}}}), HasSubstr("lacks 'active'"));
  EXPECT_THAT(refusal({.schedule_option = {{{"wait", 1}, {"wramup", 1}}}}), HasSubstr("wramup"));
  EXPECT_THAT(refusal({.schedule_option = {{{"wait", -1}}}}), HasSubstr("wait = -1"));
  Profile first({.activities = kCpu});
  EXPECT_THAT(refusal({.activities = kCpu}), HasSubstr("another profiler"));
  std::thread([&] { EXPECT_THAT(refusal({.activities = kCpu}), HasSubstr("another one of this process")); }).join();
  EXPECT_THAT(message_of<ConfigError>([&] { first.events(); }), HasSubstr("no recording has ended"));
  first.stop();
  std::thread([] { EXPECT_NO_THROW(const Profile again({.activities = kCpu})); }).join();
  EXPECT_THAT(message_of<ConfigError>([&] { first.step(); }), HasSubstr("after stop()"));
}

}  // namespace
