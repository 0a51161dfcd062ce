/// The engine alone: one test per arrow of its state table, the policy, and what happens when things go wrong.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "residency/member.hpp"
#include "residency_support.hpp"

namespace {

using namespace residency_test;
using residency::Policy;
using residency::Residency;
using residency::State;
using residency::Trace;
using residency::Unit;

/// Three units a, b, c of one parameter [4] each, filled with 1, 2, 3.
struct ThreeUnits {
  explicit ThreeUnits(const Policy& policy = {}) : engine(policy) {
    for (int i = 0; i < 3; ++i) {
      tensors.push_back(torch::full({4}, i + 1.0).requires_grad_());
      units.push_back(&add_unit(engine, std::string(1, static_cast<char>('a' + i)),
                                {{"weight_" + std::to_string(i), tensors.back()}}, [&](at::Tensor bytes) {
                                  auto home = std::make_unique<CountingHome>(std::move(bytes));
                                  homes.push_back(home.get());
                                  return home;
                                }));
    }
  }
  double sum(int i) { return torch::sum(tensors[static_cast<size_t>(i)]).item<double>(); }
  Residency engine;
  std::vector<at::Tensor> tensors;
  std::vector<Unit*> units;
  std::vector<CountingHome*> homes;
};

TEST(ResidencyStates, AnAbsentUnitIsFetchedByATouch) {
  ThreeUnits t({.prefetch = 0});
  EXPECT_EQ(t.units[1]->state(), State::absent);
  EXPECT_EQ(t.sum(1), 8);
  EXPECT_EQ(t.units[1]->state(), State::resident);
  EXPECT_EQ(t.homes[1]->fetches, 1);
  EXPECT_EQ(t.sum(1), 8);
  EXPECT_EQ(t.homes[1]->fetches, 1) << "it was present already";
}

TEST(ResidencyStates, APrefetchedUnitIsFetchingUntilItIsTouched) {
  ThreeUnits t({.prefetch = 1, .evict_after_use = true, .reuse_distance = 0});
  accelerate::residency::reset_stats();
  for (int round = 0; round < 2; ++round)
    for (int i : {0, 1, 2}) t.sum(i);
  // The order is known by now: a is present, b is on its way.
  t.sum(0);
  EXPECT_EQ(t.units[0]->state(), State::resident);
  EXPECT_EQ(t.units[1]->state(), State::fetching);
  EXPECT_EQ(t.units[2]->state(), State::absent);
  const auto before = accelerate::residency::stats();
  EXPECT_EQ(t.sum(1), 8);
  const auto after = accelerate::residency::stats();
  EXPECT_EQ(after.prefetch_hits - before.prefetch_hits, 1);
  EXPECT_EQ(after.faults, before.faults);
  EXPECT_EQ(t.units[1]->state(), State::resident);
}

TEST(ResidencyStates, AUnitIsPinnedWhileItsOperatorRuns) {
  ThreeUnits t({.prefetch = 0});
  {
    residency::Pins pins;
    pins.add(*t.units[0], false);
    t.engine.evict(*t.units[0]);
    EXPECT_EQ(t.units[0]->state(), State::resident) << "pinned units stay";
    t.engine.release();
    EXPECT_EQ(t.units[0]->state(), State::resident);
  }
  t.engine.evict(*t.units[0]);
  EXPECT_EQ(t.units[0]->state(), State::absent);
}

TEST(ResidencyStates, AChangedUnitIsStoredWhenItGoesAndAnUnchangedOneIsNot) {
  ThreeUnits t({.prefetch = 0});
  t.sum(0);
  {
    torch::NoGradGuard no_grad;
    t.tensors[1].add_(1);
    t.tensors[2].narrow(0, 0, 2).zero_();  // through a view
  }
  t.engine.release();
  EXPECT_EQ(t.homes[0]->stores, 0);
  EXPECT_EQ(t.homes[1]->stores, 1);
  EXPECT_EQ(t.homes[2]->stores, 1);
  EXPECT_EQ(t.sum(1), 12);
  EXPECT_EQ(t.sum(2), 6);
}

TEST(ResidencyStates, DataOfAnAbsentParameterIsANamedError) {
  ThreeUnits t({.prefetch = 0});
  const auto contains_name = testing::HasSubstr("parameter 'weight_1' is not resident");
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors[1].data_ptr(); }), contains_name);
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors[1].const_data_ptr(); }), contains_name);
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors[1].storage().data(); }), contains_name);
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors[1].accessor<float, 1>(); }), contains_name);
  EXPECT_THAT(support::message_of<std::exception>([&] {
                std::ostringstream out;
                torch::save(t.tensors[1], out);
              }),
              contains_name);
  {
    auto present = residency::Pins();
    present.add(*t.units[1], false);
    EXPECT_NE(t.tensors[1].data_ptr(), nullptr);
  }
  t.engine.release();
  EXPECT_THAT(support::message_of<std::exception>([&] { t.tensors[1].data_ptr(); }), contains_name)
      << "also after it was present once";
}

TEST(ResidencyStates, AMemberOutlivesItsResidencyWithAnErrorThatSaysSo) {
  at::Tensor tensor;
  {
    ThreeUnits t;
    tensor = t.tensors[0];
  }
  const auto says_so = testing::AllOf(testing::StartsWith("parameter 'weight_0' is not resident any more"),
                                      testing::EndsWith("keep that while the module is in use"));
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { torch::sum(tensor); }), says_so);
  EXPECT_THAT(support::message_of<accelerate::ConfigError>([&] { torch::sum(tensor.view({2, -1})); }), says_so);
  EXPECT_THAT(support::message_of<std::exception>([&] { tensor.data_ptr(); }),
              testing::HasSubstr("parameter 'weight_0' is not resident any more"));
}

TEST(ResidencyFaults, AFailedFetchLeavesTheUnitAbsentAndTheNextTouchWorks) {
  ThreeUnits t({.prefetch = 0});
  t.homes[0]->fail_next = true;
  accelerate::residency::reset_stats();
  const auto before = accelerate::residency::stats().resident_bytes;
  EXPECT_THAT(support::message_of<std::exception>([&] { t.sum(0); }), testing::HasSubstr("the disk is gone"));
  EXPECT_EQ(t.units[0]->state(), State::absent);
  EXPECT_EQ(accelerate::residency::stats().resident_bytes, before);
  EXPECT_EQ(t.sum(0), 4);
}

TEST(ResidencyFaults, AnExceptionInAnOperatorReleasesItsPins) {
  ThreeUnits t({.prefetch = 0});
  EXPECT_ANY_THROW(torch::matmul(t.tensors[0], torch::ones({5, 5})));
  t.engine.evict(*t.units[0]);
  EXPECT_EQ(t.units[0]->state(), State::absent);
}

TEST(ResidencyFaults, AnExceptionOfTheWorkerReachesTheTouch) {
  residency::Worker worker;
  auto transfer = worker.run([] { throw std::runtime_error("short read"); });
  EXPECT_THAT(support::message_of<std::exception>([&] { transfer->wait(); }), testing::HasSubstr("short read"));
  worker.run([] {})->wait();
}

TEST(ResidencyPolicy, EvictAfterUseKeepsOneUnitAndTheNextOne) {
  ThreeUnits t({.prefetch = 1, .evict_after_use = true, .reuse_distance = 0});
  const int64_t unit = t.units[0]->bytes();
  for (int round = 0; round < 2; ++round)
    for (int i : {0, 1, 2}) t.sum(i);
  t.engine.release();
  accelerate::residency::reset_stats();
  const int64_t base = accelerate::residency::stats().resident_bytes;
  for (int round = 0; round < 3; ++round)
    for (int i : {0, 1, 2}) t.sum(i);
  EXPECT_EQ(accelerate::residency::stats().peak_resident_bytes - base, 2 * unit);
}

TEST(ResidencyPolicy, WithoutATraceTheLeastRecentlyUsedUnitGoes) {
  ThreeUnits t({.prefetch = 0, .budget_bytes = 128});  // two units of 64 bytes
  t.sum(0), t.sum(1), t.sum(2);
  EXPECT_EQ(t.units[0]->state(), State::absent);
  EXPECT_EQ(t.units[1]->state(), State::resident);
  EXPECT_EQ(t.units[2]->state(), State::resident);
}

TEST(ResidencyPolicy, WithATraceTheUnitNeededLastGoes) {
  // A loop over three units with room for two: least-recently-used misses every time (9 of 9 later touches), the best
  // possible order misses every second time.
  ThreeUnits t({.prefetch = 0, .budget_bytes = 128});
  for (int i : {0, 1, 2, 0, 1, 2}) t.sum(i);
  accelerate::residency::reset_stats();
  for (int round = 0; round < 4; ++round)
    for (int i : {0, 1, 2}) t.sum(i);
  EXPECT_LE(accelerate::residency::stats().faults, 6);
}

TEST(ResidencyPolicy, APrefetchNeverPushesOutWhatIsNeededSooner) {
  ThreeUnits t({.prefetch = 2, .budget_bytes = 64});  // room for one
  for (int round = 0; round < 3; ++round)
    for (int i : {0, 1, 2}) EXPECT_EQ(t.sum(i), 4.0 * (i + 1));
  EXPECT_LE(accelerate::residency::stats().resident_bytes, 64 * 3);
}

TEST(ResidencyPolicy, OutstandingFetchesAreLimited) {
  ThreeUnits t({.prefetch = 2, .outstanding = 1, .evict_after_use = true, .reuse_distance = 0});
  for (int round = 0; round < 3; ++round)
    for (int i : {0, 1, 2}) t.sum(i);
  t.sum(0);
  EXPECT_EQ(t.units[1]->state(), State::fetching);
  EXPECT_EQ(t.units[2]->state(), State::absent) << "one is on its way already";
}

TEST(ResidencyPolicy, FetchesAheadAreLimitedByTheirBytes) {
  const auto fetching = [](int64_t bytes) {
    ThreeUnits t({.prefetch = 2, .prefetch_bytes = bytes, .evict_after_use = true, .reuse_distance = 0});
    for (int round = 0; round < 3; ++round)
      for (int i : {0, 1, 2}) t.sum(i);
    t.sum(0);
    return (t.units[1]->state() == State::fetching) + (t.units[2]->state() == State::fetching);
  };
  EXPECT_EQ(fetching(0), 0);
  EXPECT_EQ(fetching(1), 1) << "the first is under way before there is enough";
  EXPECT_EQ(fetching(64), 1);
  EXPECT_EQ(fetching(65), 2);
}

TEST(ResidencyPolicy, AUnitStaysThatComesBackAfterFewBytes) {
  const auto is_kept = [](int64_t bytes) {
    ThreeUnits t({.prefetch = 0, .evict_after_use = true, .reuse_bytes = bytes});
    for (int round = 0; round < 3; ++round)
      for (int i : {0, 1, 2}) t.sum(i);
    t.sum(0);
    t.sum(1);  // c comes next, and then a
    return t.units[0]->state() == State::resident;
  };
  EXPECT_FALSE(is_kept(0));
  EXPECT_FALSE(is_kept(63));
  EXPECT_TRUE(is_kept(64)) << "a unit of 64 bytes is in between";
}

TEST(ResidencyPolicy, AKeptUnitStaysUntilAllAreReleased) {
  Residency engine({.prefetch = 0, .evict_after_use = true});
  auto root = torch::ones({4}), block = torch::ones({4});
  const auto home = [](at::Tensor bytes) { return std::make_unique<CountingHome>(std::move(bytes)); };
  auto& kept = add_unit(engine, "root", {{"root", root}}, home, /*keep=*/true);
  auto& other = add_unit(engine, "block", {{"block", block}}, home);
  torch::sum(root), torch::sum(block), torch::sum(root);
  EXPECT_EQ(kept.state(), State::resident);
  EXPECT_EQ(other.state(), State::absent);
  engine.release();
  EXPECT_EQ(kept.state(), State::absent);
}

TEST(ResidencyTrace, ARepeatedOrderIsPredictedAndAChangedOneIsLearnt) {
  Trace trace;
  const std::vector<int32_t> forward_backward{0, 1, 2, 3, 2, 1, 0, 4};
  for (int round = 0; round < 2; ++round)
    for (int32_t unit : forward_backward) trace.record(unit);
  const int64_t before = trace.surprises();
  for (int round = 0; round < 3; ++round)
    for (int32_t unit : forward_backward) trace.record(unit);
  EXPECT_EQ(trace.surprises(), before) << "nothing new, also not where forward and backward pass the same units";
  EXPECT_EQ(trace.next(1), 0);
  EXPECT_EQ(trace.next(2), 1);
  EXPECT_EQ(trace.distance(3), 4);
  EXPECT_EQ(trace.distance(9), Trace::kNever);
  const std::vector<int32_t> other{0, 2, 4, 1};
  for (int round = 0; round < 2; ++round)
    for (int32_t unit : other) trace.record(unit);
  const int64_t learnt = trace.surprises();
  for (int32_t unit : other) trace.record(unit);
  EXPECT_EQ(trace.surprises(), learnt);
}

TEST(ResidencyTrace, ForgetsTheOldestAndStaysRight) {
  Trace trace;
  for (int i = 0; i < 100000; ++i) trace.record(i % 7);
  EXPECT_EQ(trace.next(1), 100000 % 7);
  EXPECT_EQ(trace.distance(100000 % 7), 1);
  EXPECT_LE(trace.surprises(), 10) << "seven first touches, the first return, and nothing when the oldest half goes";
}

TEST(ResidencyThreads, AUnitTouchedFromTwoThreadsIsRightInBoth) {
  ThreeUnits t({.prefetch = 1, .budget_bytes = 64, .evict_after_use = true, .reuse_distance = 0});
  std::atomic<int> wrong{0};
  const auto work = [&](int shift) {
    torch::NoGradGuard no_grad;
    for (int n = 0; n < 300; ++n) {
      const int i = (n * (shift + 1) + shift) % 3;
      if (t.sum(i) != 4.0 * (i + 1)) ++wrong;
    }
  };
  std::thread one(work, 0), two(work, 1);
  one.join();
  two.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ResidencySummon, MakesAllPresentAndWritesBackWhenAsked) {
  auto module = torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 2));
  auto engine = shard_children(module.ptr(), {.prefetch = 0});
  auto weight = module->children()[0]->as<torch::nn::Linear>()->weight;
  {
    auto present = residency::summon(module);
    std::fill_n(weight.data_ptr<float>(), 16, 3.0f);
  }
  EXPECT_EQ(engine->units()[0]->state(), State::absent);
  EXPECT_EQ(torch::sum(weight).item<double>(), 48);
  {
    auto present = residency::summon(module, {.writeback = false});
    std::fill_n(weight.data_ptr<float>(), 16, 5.0f);
  }
  EXPECT_EQ(torch::sum(weight).item<double>(), 48);
  EXPECT_THAT(
      support::message_of<accelerate::ConfigError>([&] { auto s = residency::summon(module, {.rank0_only = true}); }),
      testing::HasSubstr("rank0_only together with writeback"));
}

TEST(ResidencyMembers, ReplacedBytesAreNoticed) {
  auto module = torch::nn::Linear(4, 4);
  Residency engine({.prefetch = 0});
  add_unit(engine, "root", ModelRef(module.ptr()).parameters(),
           [](at::Tensor bytes) { return std::make_unique<CountingHome>(std::move(bytes)); });
  EXPECT_EQ(engine.replaced_member(), nullptr);
  module->to(torch::kDouble);
  ASSERT_NE(engine.replaced_member(), nullptr);
  EXPECT_EQ(engine.replaced_member()->name(), "weight");
}

TEST(ResidencyMembers, SizesStridesAndAlignmentAreKept) {
  auto channels_last = torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const auto copy = channels_last.clone();
  Residency engine({.prefetch = 0});
  residency::PartSpec part;
  part.layout = residency::lay_out({channels_last, torch::ones({1})});
  EXPECT_EQ(part.layout.offsets, (std::vector<int64_t>{0, 128}));
  EXPECT_EQ(part.layout.numel, 144);
  EXPECT_EQ(residency::lay_out({channels_last, torch::ones({1})}, 4).numel, 192) << "four equal, aligned shards";
  at::Tensor bytes = torch::zeros({part.layout.numel});
  bytes.as_strided(copy.sizes(), copy.strides()).copy_(copy);
  part.home = std::make_unique<CountingHome>(bytes);
  part.members = {{"w", channels_last}};
  std::vector<residency::PartSpec> parts;
  parts.push_back(std::move(part));
  engine.add("u", std::move(parts));
  EXPECT_EQ(channels_last.strides(), copy.strides());
  EXPECT_TRUE(torch::equal(channels_last, copy));
}

}  // namespace
