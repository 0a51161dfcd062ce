// Memory as it was at a mark, read while it is rewritten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "optim/kernels/step.hpp"
#include "snapshot/counts.hpp"
#include "snapshot/ledger.hpp"

using namespace accelerate;
using snapshot::Ledger;
using snapshot::SnapshotCount;
using testing::HasSubstr;

namespace {

/// Two chunks and a bit.
constexpr int64_t kElements = (2 * snapshot::kChunkBytes + 100) / 4;

class Snapshot : public testing::Test {
 protected:
  void SetUp() override { counts::reset(); }
  void TearDown() override { snapshot::set_current(nullptr); }

  /// Its values as a writer's thread gets them.
  static at::Tensor read(Ledger& ledger, const at::Tensor& held) {
    const auto values = at::empty_like(held);
    auto* to = static_cast<char*>(values.mutable_data_ptr());
    ledger.read(held.const_data_ptr(), static_cast<int64_t>(held.nbytes()),
                [&](std::string_view part) { to = std::copy(part.begin(), part.end(), to); });
    return values;
  }
  static std::shared_ptr<Ledger> ledger_of(const std::vector<snapshot::NamedTensor>& state,
                                           const std::vector<snapshot::NamedTensor>& views = {}) {
    auto ledger = std::make_shared<Ledger>(state, views);
    snapshot::set_current(ledger);
    return ledger;
  }
};

TEST_F(Snapshot, WhatIsRewrittenIsReadAsItWas) {
  const auto parameter = torch::rand({kElements}), buffer = torch::rand({7});
  const auto before = parameter.clone(), before_buffer = buffer.clone();
  const auto ledger = ledger_of({{"parameter", parameter}});
  const auto held = ledger->hold(parameter, Ledger::Order::row_major);
  const auto copied = ledger->hold(buffer, Ledger::Order::row_major);
  EXPECT_EQ(held.const_data_ptr(), parameter.const_data_ptr()) << "it was copied";
  EXPECT_EQ(ledger->copied_bytes(), 28);
  EXPECT_EQ(ledger->state_bytes(), 4 * kElements);
  snapshot::keep(parameter);
  parameter.zero_(), buffer.zero_();
  EXPECT_TRUE(read(*ledger, held).equal(before));
  EXPECT_TRUE(read(*ledger, copied).equal(before_buffer));
  EXPECT_EQ(counts::read(SnapshotCount::kept_bytes), 4 * kElements);
  EXPECT_EQ(ledger->finish(), "");
}

TEST_F(Snapshot, WhatWasReadIsNotKept) {
  const auto parameter = torch::rand({kElements});
  const auto ledger = ledger_of({{"parameter", parameter}});
  const auto held = ledger->hold(parameter, Ledger::Order::row_major);
  EXPECT_TRUE(read(*ledger, held).equal(parameter));
  snapshot::keep_all();
  EXPECT_EQ(counts::read(SnapshotCount::kept_bytes), 0);
}

TEST_F(Snapshot, PartsOfOneStorageAndTiedTensorsAreReadEachByItself) {
  const auto flat = torch::rand({1000});
  const auto first = flat.narrow(0, 0, 600), second = flat.narrow(0, 600, 400);
  const auto before = flat.clone();
  const auto ledger = ledger_of({{"first", first}, {"second", second}});
  const auto a = ledger->hold(first, Ledger::Order::as_it_is), tied = ledger->hold(first, Ledger::Order::row_major);
  const auto b = ledger->hold(second.view({20, 20}), Ledger::Order::row_major);
  EXPECT_EQ(a.storage().nbytes(), 2400u) << "a file would get all of the storage";
  EXPECT_TRUE(read(*ledger, a).equal(before.narrow(0, 0, 600)));
  snapshot::keep(flat);
  flat.zero_();
  EXPECT_TRUE(read(*ledger, tied).equal(before.narrow(0, 0, 600)));
  EXPECT_TRUE(read(*ledger, b).flatten().equal(before.narrow(0, 600, 400)));
  EXPECT_EQ(ledger->copied_bytes(), 0);
}

TEST_F(Snapshot, MemoryOfATensorThatGetsOtherStorageStays) {
  auto parameter = torch::rand({kElements});
  const auto before = parameter.clone();
  const auto ledger = ledger_of({{"parameter", parameter}});
  const auto held = ledger->hold(parameter, Ledger::Order::row_major);
  parameter.set_data(torch::zeros({kElements}));
  EXPECT_TRUE(read(*ledger, held).equal(before));
}

TEST_F(Snapshot, AWriteThatNobodyAnnouncedIsNamed) {
  const auto parameter = torch::rand({10}), other = torch::rand({10});
  const auto ledger = ledger_of({{"first.weight", parameter}, {"other", other}});
  ledger->hold(parameter, Ledger::Order::row_major), ledger->hold(other, Ledger::Order::row_major);
  snapshot::keep(other);
  other.zero_();  // announced
  parameter.zero_();
  EXPECT_THAT(ledger->finish(), testing::AllOf(HasSubstr("'first.weight'"), HasSubstr("wait_for_checkpoint()")));
}

// As parameters are of shards: their versions are their own.
TEST_F(Snapshot, AWriteThroughAViewIsNamed) {
  const auto flat = torch::rand({100});
  const auto before = torch::from_blob(flat.mutable_data_ptr(), {60}),
             after = torch::from_blob(flat.mutable_data_ptr<float>() + 60, {40});
  for (const bool second : {false, true}) {
    const auto ledger = ledger_of({{"shard", flat}}, {{"before", before}, {"after", after}});
    ledger->hold(flat, Ledger::Order::row_major);
    (second ? after : before).zero_();
    EXPECT_THAT(ledger->finish(), HasSubstr(second ? "'after' was changed" : "'before' was changed"));
  }
}

// A chunk is given from where it lies, so who is about to rewrite it waits until all of it is taken.
TEST_F(Snapshot, WhoComesToAChunkThatIsBeingReadWaits) {
  const auto parameter = torch::rand({1 << 18});
  const auto before = parameter.clone();
  const auto ledger = ledger_of({{"weight", parameter}});
  const auto held = ledger->hold(parameter, Ledger::Order::row_major);
  std::string taken;
  std::thread writes;
  ledger->read(held.const_data_ptr(), static_cast<int64_t>(held.nbytes()), [&](std::string_view part) {
    if (!writes.joinable()) {
      writes = std::thread([&] {
        snapshot::keep(parameter);
        parameter.zero_();
      });
      while (!parameter.eq(0).any().item<bool>() && counts::read(SnapshotCount::waits) == 0) std::this_thread::yield();
    }
    taken.append(part);
  });
  writes.join();
  ASSERT_EQ(taken.size(), before.nbytes());
  EXPECT_EQ(std::memcmp(taken.data(), before.const_data_ptr(), taken.size()), 0);
  EXPECT_TRUE(parameter.eq(0).all().item<bool>());
  EXPECT_EQ(counts::read(SnapshotCount::kept_bytes), 0) << "it was read before it was rewritten";
  EXPECT_EQ(counts::read(SnapshotCount::waits), 1);
}

// Parts of one memory count each other's writes.
TEST_F(Snapshot, AStepMayWriteToOnePartAndThenAnnounceTheNext) {
  const auto flat = torch::rand({100});
  const auto first = flat.narrow(0, 0, 60), second = flat.narrow(0, 60, 40), third = torch::rand({5});
  for (const bool writes_before : {false, true})
    for (const bool writes_after : {false, true}) {
      const auto ledger = ledger_of({{"first", first}, {"second", second}, {"third", third}});
      for (const auto& tensor : {first, second, third}) ledger->hold(tensor, Ledger::Order::row_major);
      if (writes_before) second.add_(1);
      {
        const snapshot::StepWrites writes;
        snapshot::keep(first);
        first.zero_();
        snapshot::keep(second);
        second.zero_();
      }
      if (writes_after) third.zero_();
      EXPECT_EQ(ledger->finish().empty(), !writes_before && !writes_after);
    }
}

TEST_F(Snapshot, StepsKeepWhatTheyRewrite) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    const auto state_type = type == at::kDouble ? at::kDouble : at::kFloat;
    const auto parameter = torch::rand({kElements}).to(type), gradient = torch::rand({kElements}).to(type);
    const auto first = torch::rand({kElements}).to(state_type), second = torch::rand({kElements}).to(state_type);
    const std::vector<at::Tensor> all{parameter, first, second};
    std::vector<at::Tensor> before, held, alone;
    for (const auto& tensor : all) before.push_back(tensor.clone()), alone.push_back(tensor.clone());
    const auto slices_of = [&](const std::vector<at::Tensor>& tensors) {
      return std::vector<optim::kernels::StepSlice>{{.count = kElements,
                                                     .parameter_type = type,
                                                     .gradient_type = type,
                                                     .state_type = state_type,
                                                     .parameter = tensors[0].mutable_data_ptr(),
                                                     .gradient = gradient.mutable_data_ptr(),
                                                     .first = tensors[1].mutable_data_ptr(),
                                                     .second = tensors[2].mutable_data_ptr()}};
    };
    const optim::kernels::AdamStep rule{0.1, 0.9, 0.99, 1e-8, 0.01, true, 3};
    optim::kernels::step(rule, slices_of(alone));
    const auto ledger = ledger_of({{"p", parameter}, {"m", first}, {"v", second}});
    for (const auto& tensor : all) held.push_back(ledger->hold(tensor, Ledger::Order::row_major));
    EXPECT_TRUE(read(*ledger, held[1]).equal(before[1]));  // the writer was there first
    const auto kept = counts::read(SnapshotCount::kept_bytes);
    optim::kernels::step(rule, slices_of(all));
    EXPECT_EQ(counts::read(SnapshotCount::kept_bytes) - kept,
              static_cast<int64_t>(parameter.nbytes() + second.nbytes()));
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i].equal(alone[i])) << "a step that keeps is another one: " << type << ", " << i;
      if (i != 1) EXPECT_TRUE(read(*ledger, held[i]).equal(before[i])) << type << ", " << i;
    }
    EXPECT_EQ(ledger->finish(), "");
  }
}

}  // namespace
