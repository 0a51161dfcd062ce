// Shards in any home, by any wire: what ranks gather, write and keep.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "accelerate/formats/safetensors.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "comm/group.hpp"
#include "message_of.hpp"
#include "ranks.hpp"
#include "residency/homes/file.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/shard.hpp"

using namespace accelerate;
using namespace accelerate::residency;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

constexpr int64_t kNumel = 96, kStretch = 40, kBlock = 8;

/// Of the whole flat storage: no two alike, none exact in fewer bits.
at::Tensor values() { return torch::linspace(-1.3, 1.7, kNumel).sin(); }
at::Tensor own(const at::Tensor& flat) {
  const int64_t length = kNumel / world_size();
  return flat.narrow(0, rank() * length, length);
}

KeptSlice in_home(const std::string& kind, const std::string& folder) {
  at::Tensor mine = own(values()).clone();
  if (kind == "memory") return in_memory(mine);
  KeptSlice slice{.home = nullptr, .numel = mine.numel(), .dtype = at::kFloat};
  auto worker = std::make_shared<Worker>();
  if (kind == "host") {
    slice.home = host_home(mine, worker);
  } else {
    const std::string path = folder + "/stretch_" + std::to_string(rank()) + ".safetensors";
    save_safetensors(path, {{"stretch", mine}});
    slice.home = std::move(FileTensors(path, worker).read({{"stretch", mine}}).front().home);
  }
  return slice;
}

std::unique_ptr<Wire> wire_named(const std::string& kind) {
  if (kind == "fp8")
    return float8_wire({{.begin = 0, .length = kStretch}, {.begin = kStretch, .length = kNumel - kStretch}},
                       torch::tensor({256.f, 128.f}));
  return kind == "int8" ? int8_wire(kBlock) : nullptr;
}

at::Tensor fetched(Home& home, at::ScalarType type = at::kFloat) {
  at::Tensor flat = torch::full({kNumel}, std::numeric_limits<float>::quiet_NaN(), type);
  if (const auto coming = home.fetch(flat)) coming->wait();
  return flat;
}

/// All ranks' slices, each as it comes out of the wire.
at::Tensor as_sent(const at::Tensor& flat, const Wire* wire) {
  if (!wire) return flat.clone();
  at::Tensor came = torch::empty_like(flat);
  const int64_t length = kNumel / world_size();
  for (int64_t r = 0; r < world_size(); ++r)
    wire->decode(wire->encode(flat.narrow(0, r * length, length), r * length), r * length,
                 came.narrow(0, r * length, length));
  return came;
}

}  // namespace

RANKS_TEST(Homes, ShardsLieInAnyHomeAndTravelByAnyWire, 2, 3, 4) {
  const PartialState state;
  const auto group = comm::world_group();
  const auto near = world_size() == 4 ? group->split("near", [](int64_t r) { return r / 2; }) : nullptr;
  const std::string folder = support::scratch_dir();
  for (const std::string in : {"memory", "host", "file"})
    for (const std::string by : {"as they are", "fp8", "int8"}) {
      SCOPED_TRACE(in + ", " + by);
      const auto wire = wire_named(by);
      const auto home = shard_home(in_home(in, folder), group, near, "unit", wire_named(by));
      at::Tensor whole = values();
      EXPECT_TRUE(home->collective());
      const at::Tensor flat = fetched(*home);
      EXPECT_TRUE(flat.equal(as_sent(whole, wire.get())));
      if (near) {
        const at::Tensor coarse =
            fetched(*home, at::kBFloat16);  // rounded once more, which another encoding would show
        home->keep_for_backward(coarse);
        EXPECT_TRUE(fetched(*home, at::kBFloat16).equal(coarse)) << "of neighbours";
      }

      // An operator writes some elements of all; each rank keeps its own.
      const auto before = home->version();
      const at::Tensor some = torch::full({30}, 0.3f);
      home->take(20, some);
      whole.narrow(0, 20, 30).copy_(some);
      EXPECT_TRUE(rank() != 0 || home->version() != before);
      EXPECT_TRUE(fetched(*home).equal(as_sent(whole, wire.get())));

      // Code that goes around operators writes one; what it left alone stays as exact as it was.
      at::Tensor raw = fetched(*home);
      raw[50] = 0.7f;
      home->store(raw);
      whole[50] = 0.7f;
      at::Tensor kept = torch::zeros({kNumel});
      home->refine(0, kept);
      EXPECT_TRUE(own(kept).equal(own(whole)));
      EXPECT_TRUE(fetched(*home).equal(as_sent(whole, wire.get())));
    }
}

TEST(Homes, WholeNumbersOnTheWireAreOffByHalfTheirScale) {
  const auto wire = int8_wire(kBlock);
  for (const int64_t numel : {0, 1, 7, 8, 61}) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      at::Tensor sent = (torch::randn({numel}) * torch::logspace(-3, 3, numel)).to(type);
      const at::Tensor message = wire->encode(sent, 5);
      EXPECT_EQ(message.numel(), wire->bytes(numel));
      EXPECT_LE(message.numel(), numel + 4 * ((numel + kBlock - 1) / kBlock) + 3);
      at::Tensor came = torch::empty({numel}, at::kFloat);
      wire->decode(message, 5, came);
      for (int64_t from = 0; from < numel; from += kBlock) {
        const int64_t length = std::min(kBlock, numel - from);
        const at::Tensor block = sent.narrow(0, from, length).to(at::kFloat);
        const double largest = block.abs().max().item<double>();
        // And what fp32 rounds in a scale and a product.
        EXPECT_LE((came.narrow(0, from, length) - block).abs().max().item<double>(), largest * (0.5 / 127 + 1e-6));
      }
    }
  }
  at::Tensor broken = torch::ones({2 * kBlock}), came = torch::empty({2 * kBlock});
  broken[3] = std::numeric_limits<float>::infinity();
  wire->decode(wire->encode(broken, 0), 0, came);
  EXPECT_TRUE(came.narrow(0, 0, kBlock).isnan().all().item<bool>());
  EXPECT_TRUE(came.narrow(0, kBlock, kBlock).equal(torch::ones({kBlock})));
  EXPECT_THAT(support::message_of<ConfigError>([] { int8_wire(0); }), HasSubstr("expected at least 1"));
}
