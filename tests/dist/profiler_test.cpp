/// A rank's trace of communication, of where parameters live, of data and of checkpoints.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <thread>

#include "accelerate/accelerate.hpp"
#include "both_stores.hpp"
#include "comm/clock_offset.hpp"
#include "comm/group.hpp"
#include "message_of.hpp"
#include "scratch.hpp"
#include "variable.hpp"
#include "warnings_of.hpp"

namespace {

using namespace accelerate;
namespace nn = torch::nn;
using nlohmann::json;
using support::on_both_stores;
using support::scratch;
using support::Variable;

constexpr int64_t kWidth = 64;

struct NetImpl : nn::Module {
  NetImpl() {
    first = register_module("first", nn::Linear(kWidth, kWidth));
    second = register_module("second", nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Net);

struct Span {
  std::string kind, subject;
  int64_t bytes = 0;
  double begin = 0, end = 0;
  int64_t tid = 0;
  friend std::ostream& operator<<(std::ostream& out, const Span& s) {
    return out << s.kind << " " << s.subject << " " << s.bytes << " [" << s.begin << ", " << s.end << ") on " << s.tid;
  }
};

struct Trace {
  json all;
  std::vector<Span> spans;
  std::map<int64_t, std::string> lanes;

  explicit Trace(const std::filesystem::path& file) : all(json::parse(std::ifstream(file))) {
    static const std::regex kName("accelerate::([a-z_]+) ([^ ]+) bytes=([0-9]+)");
    for (const auto& e : all["traceEvents"]) {
      const std::string name = e.value("name", "");
      if (name == "thread_name") lanes[e["tid"]] = e["args"]["name"];
      std::smatch parts;
      if (!name.starts_with("accelerate::")) continue;
      EXPECT_TRUE(std::regex_match(name, parts, kName)) << name;
      EXPECT_EQ(e["cat"], "user_annotation");
      EXPECT_EQ(e["ph"], "X");
      const double begin = e["ts"];
      spans.push_back({parts[1], parts[2], std::stoll(parts[3]), begin, begin + e["dur"].get<double>(), e["tid"]});
    }
  }
  std::vector<Span> of(const std::string& kind, const std::string& subject = "") const {
    std::vector<Span> found;
    for (const auto& span : spans)
      if (span.kind == kind && (subject.empty() || span.subject == subject)) found.push_back(span);
    return found;
  }
};

/// Three steps with batches from a loader; the last two are recorded.
template <class Options> Trace trace_of(Options options, const std::string& folder) {
  options.cpu = true;
  Accelerator accelerator(options);
  torch::manual_seed(1);
  Net net;
  const auto rows = torch::randn({24, kWidth}).unbind(0);
  auto [model, optimizer, loader] =
      accelerator.prepare(net, torch::optim::AdamW(net->parameters(), 0.1), data::DataLoader(rows, {.batch_size = 4}));
  auto profile =
      accelerator.profile(ProfileKwargs{.activities = {{"cpu"}},
                                        .schedule_option = {{{"wait", 0}, {"warmup", 1}, {"active", 2}, {"repeat", 1}}},
                                        .output_trace_dir = folder});
  for (auto& batch : loader) {
    accelerator.backward(model(batch).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
    if (profile.step_num() == 2) {
      accelerator.save_state(folder + "/state");
      accelerator.load_state(folder + "/state");
    }
    profile.step();
  }
  profile.stop();
  return Trace(folder + "/profile_" + std::to_string(PartialState().process_index()) + ".json");
}

RANKS_TEST(ProfiledRanks, ShardsAreGatheredAndGradientsReduced, 2) {
  on_both_stores([](const std::string& store) {
    const bool shared = store.ends_with("1");
    const auto trace = trace_of(
        AcceleratorOptions{
            .fsdp_plugin = FullyShardedDataParallelPlugin{.sharding_strategy = ShardingStrategy::full_shard,
                                                          .auto_wrap_policy = AutoWrapPolicy::transformer_based_wrap,
                                                          .transformer_cls_names_to_wrap = {{"Linear"}}}},
        scratch(shared ? "shared" : "gathered").string());
    constexpr int64_t kBytes = (kWidth * kWidth + kWidth) * 4;
    for (const char* unit : {"first", "second"}) {
      ASSERT_EQ(trace.of("gradient_reduce", unit).size(), 2) << store;
      for (const auto& span : trace.of("gradient_reduce", unit)) EXPECT_EQ(span.bytes, kBytes) << span;
      if (shared) continue;
      EXPECT_GE(trace.of("unit_gather", unit).size(), 2) << store;
      EXPECT_GE(trace.of("unit_wait", unit).size(), 2) << store;
      EXPECT_GE(trace.of("unit_evict", unit).size(), 2) << store;
      for (const auto& gather : trace.of("unit_gather", unit)) {
        EXPECT_EQ(gather.bytes, kBytes) << gather;
        EXPECT_TRUE(trace.lanes.at(gather.tid).starts_with("accelerate communication")) << gather;
      }
      // A wait for a unit lasts until it has been gathered.
      for (const auto& wait : trace.of("unit_wait", unit))
        EXPECT_TRUE(std::ranges::any_of(trace.of("unit_gather", unit), [&](const Span& gather) {
          return gather.begin <= wait.begin && gather.end <= wait.end + 5;
        })) << wait;
    }
    EXPECT_FALSE(trace.of("comm_wait").empty()) << store;
    EXPECT_FALSE(trace.of("collective").empty()) << store;  // save_state
  });
}

RANKS_TEST(ProfiledRanks, BucketsAreReduced, 2) {
  on_both_stores([](const std::string& store) {
    const auto trace = trace_of(AcceleratorOptions{}, scratch(store.ends_with("1") ? "shared" : "sent").string());
    const auto buckets = trace.of("gradient_reduce");
    ASSERT_EQ(buckets.size(), 2) << store;
    EXPECT_EQ(buckets[0].subject, "bucket0");
    EXPECT_EQ(buckets[0].bytes, 2 * (kWidth * kWidth + kWidth) * 4);
    if (!store.ends_with("1")) {
      EXPECT_EQ(trace.lanes.at(buckets[0].tid), "accelerate communication");
    }
  });
}

TEST(ProfiledRanks, DataCheckpointsAndSteps) {
  if (support::is_rank()) return;
  const auto trace = trace_of(AcceleratorOptions{}, scratch("alone").string());
  ASSERT_EQ(trace.of("loader_wait").size(), 2);  // each step reads one ahead
  EXPECT_EQ(trace.of("loader_wait")[0].bytes, 4 * kWidth * 4);
  EXPECT_EQ(trace.of("loader_wait")[0].subject, "loader0");
  const auto model = trace.of("checkpoint_write", "model.safetensors");
  ASSERT_EQ(model.size(), 1);
  EXPECT_EQ(model[0].bytes, 2 * (kWidth * kWidth + kWidth) * 4);
  const auto optimizer = trace.of("checkpoint_write", "optimizer.bin");
  ASSERT_EQ(optimizer.size(), 1);
  EXPECT_EQ(optimizer[0].bytes, static_cast<int64_t>(std::filesystem::file_size(scratch("alone/state/optimizer.bin"))));
  ASSERT_EQ(trace.of("checkpoint_read", "model.safetensors").size(), 1);
  EXPECT_EQ(trace.of("checkpoint_read", "model.safetensors")[0].bytes, model[0].bytes);
  EXPECT_EQ(trace.of("checkpoint_read", "optimizer.bin").size(), 1);
  // The program's steps, which the schedule counts.
  const auto& steps = trace.all["accelerate_steps"];
  ASSERT_EQ(steps.size(), 2);
  EXPECT_EQ(steps[0]["step"], 1);
  EXPECT_LE(steps[0]["end_us"].get<double>(), steps[1]["begin_us"].get<double>());
  EXPECT_EQ(trace.of("step", "2").size(), 1);
  // Our clock is Kineto's: what happens in a step lies within it.
  for (const auto& wait : trace.of("loader_wait"))
    EXPECT_TRUE(std::ranges::any_of(steps, [&](const json& step) {
      return step["begin_us"] <= wait.begin && wait.end <= step["end_us"];
    })) << wait;
}

/// Two steps of a program that knows nothing of profiles.
void train() {
  Accelerator accelerator({.cpu = true});
  Net net;
  auto [model, optimizer, loader] =
      accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1),
                          data::DataLoader(torch::randn({16, kWidth}).unbind(0), {.batch_size = 2}));
  for (auto& batch : loader) {
    auto step = accelerator.accumulate(model);
    accelerator.backward(model(batch).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.end_training();
}

RANKS_TEST(ProfiledRanks, TheEnvironmentAsksForAll, 2) {
  const Variable folder("ACCELERATE_PROFILE_DIR", scratch("all").string());
  const Variable accumulation("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2");
  train();
  const Trace trace(scratch("all/profile_" + std::to_string(support::rank()) + ".json"));
  EXPECT_EQ(trace.all["distributedInfo"]["rank"], support::rank());
  EXPECT_EQ(trace.all["accelerate_clock"], (json{{"offset_ns", 0}, {"error_ns", 0}}));  // one machine, one clock
  EXPECT_EQ(trace.all["accelerate_steps"].size(), 2);                                   // that synchronised
  EXPECT_EQ(trace.of("loader_wait").size(), 5);                                         // the last finds the end
}

TEST(ProfiledRanks, TheEnvironmentAsksForSomeSteps) {
  if (support::is_rank()) return;
  const Variable folder("ACCELERATE_PROFILE_DIR", scratch("some").string()), skip("ACCELERATE_PROFILE_SKIP_FIRST", "2"),
      warmup("ACCELERATE_PROFILE_WARMUP", "1"), active("ACCELERATE_PROFILE_ACTIVE", "3"),
      repeat("ACCELERATE_PROFILE_REPEAT", "1"), shapes("ACCELERATE_PROFILE_RECORD_SHAPES", "1"),
      memory("ACCELERATE_PROFILE_MEMORY", "true");
  support::reset_states();
  train();
  const Trace trace(scratch("some/profile_0.json"));
  std::vector<int64_t> steps;
  for (const auto& step : trace.all["accelerate_steps"]) steps.push_back(step["step"]);
  EXPECT_THAT(steps, testing::ElementsAre(3, 4, 5));
  const auto has = [&](const std::string& what) { return trace.all.dump().find(what) != std::string::npos; };
  EXPECT_TRUE(has("Input Dims"));
  EXPECT_TRUE(has("[memory]"));
  // A setting that does not fit is an error, one that records nothing a warning.
  {
    const Variable wrong("ACCELERATE_PROFILE_REPEAT", "often");
    support::reset_states();
    EXPECT_THAT(support::message_of<ConfigError>(train), testing::HasSubstr("ACCELERATE_PROFILE_REPEAT"));
  }
  {
    const Variable late("ACCELERATE_PROFILE_SKIP_FIRST", "100");
    support::reset_states();
    EXPECT_THAT(support::warnings_of(train), testing::HasSubstr("ended after 8 steps"));
  }
}

TEST(ProfiledRanks, TheEnvironmentSaysWhatIsRecorded) {
  if (support::is_rank()) return;
  // LibTorch knows stacks and modules of TorchScript only.
  torch::jit::Module module("Doubler");
  module.define("def forward(self, x):\n  return torch.matmul(x, x)\n");
  const auto input = torch::ones({200, 200});
  const auto recorded_with = [&](const char* variable) {
    const Variable folder("ACCELERATE_PROFILE_DIR", scratch("what").string()), what(variable, "yes");
    support::reset_states();
    {
      const Accelerator accelerator({.cpu = true});
      for (int i = 0; i < 3; ++i) module.forward({input});
    }
    return json::parse(std::ifstream(scratch("what/profile_0.json"))).dump();
  };
  recorded_with("ACCELERATE_PROFILE_STACK");  // the first calls optimise the module
  EXPECT_THAT(recorded_with("ACCELERATE_PROFILE_STACK"), testing::HasSubstr("Call stack"));
  EXPECT_THAT(recorded_with("ACCELERATE_PROFILE_MODULES"),
              testing::AllOf(testing::HasSubstr("Module Hierarchy"), testing::Not(testing::HasSubstr("Call stack"))));
  EXPECT_THAT(recorded_with("ACCELERATE_PROFILE_FLOPS"),
              testing::AllOf(testing::HasSubstr("Input Dims"), testing::Not(testing::HasSubstr("Module Hierarchy"))));
}

TEST(ProfiledRanks, AProgramsOwnProfileGoesFirst) {
  if (support::is_rank()) return;
  const Variable folder("ACCELERATE_PROFILE_DIR", scratch("run").string());
  support::reset_states();
  Accelerator accelerator({.cpu = true});
  torch::ones(2);
  EXPECT_THAT(support::warnings_of([&] {
                auto profile = accelerator.profile(ProfileKwargs{.activities = {{"cpu"}}});
                torch::zeros(2);
                profile.stop();
                EXPECT_EQ(profile.events().events.front().name, "aten::zeros");
              }),
              testing::HasSubstr("a profile of its own"));
  EXPECT_TRUE(std::filesystem::exists(scratch("run/profile_0.json")));
}

TEST(ProfiledRanks, OperatorsOfWorkersAreSeen) {
  if (support::is_rank()) return;
  support::reset_states();
  Accelerator accelerator({.cpu = true});
  // Its workers make tensors of lists of rows.
  auto loader =
      accelerator.prepare(data::DataLoader(torch::randn({8, 4}).unbind(0), {.batch_size = 2, .num_workers = 2}));
  auto profile = accelerator.profile(ProfileKwargs{.activities = {{"cpu"}}});
  std::thread own([] { torch::ones({3}).cumsum(0); });
  own.join();
  for (auto& batch : loader) torch::sum(batch);
  profile.stop();
  profile.export_chrome_trace(scratch("workers.json"));
  const auto row = [&](const std::string& name) -> const ProfileEvent* {
    for (const auto& event : profile.events().events)
      if (event.name == name) return &event;
    return nullptr;
  };
  ASSERT_TRUE(row("aten::cumsum"));
  EXPECT_NE(row("aten::cumsum")->thread, row("aten::sum")->thread);
  EXPECT_FALSE(row("aten::cumsum")->children.empty());
  EXPECT_THAT(
      profile.events().events,
      testing::Contains(testing::AllOf(testing::Field(&ProfileEvent::name, "aten::empty"),  // a batch's
                                       testing::Field(&ProfileEvent::thread, testing::Ne(row("aten::sum")->thread)))));
  const auto trace = json::parse(std::ifstream(scratch("workers.json")));
  std::map<std::string, int64_t> threads;
  for (const auto& e : trace["traceEvents"])
    if (e.value("cat", "") == "cpu_op") threads[e["name"]] = e["tid"];
  EXPECT_NE(threads.at("aten::cumsum"), threads.at("aten::sum"));
}

RANKS_TEST(ProfiledRanks, ClocksAreCompared, 3) {
  const PartialState state({.cpu = true});
  constexpr int64_t kAhead = 5'000'000'000;
  const auto clock = [] { return c10::getTime() + support::rank() * kAhead; };
  const auto found = comm::clock_offset(*comm::world_group(), clock);
  EXPECT_LE(std::abs(found.offset_ns + support::rank() * kAhead), found.error_ns);
  EXPECT_LT(found.error_ns, kAhead / 2) << "else it would say nothing";
  EXPECT_EQ(found.error_ns == 0, support::rank() == 0);
  EXPECT_EQ(comm::clock_offset(*comm::world_group()).error_ns, 0);  // the same machine
}

}  // namespace
