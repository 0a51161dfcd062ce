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
#include "residency/homes/coded.hpp"
#include "residency/homes/file.hpp"
#include "residency/homes/host.hpp"
#include "residency/homes/shard.hpp"

using namespace accelerate;
using namespace accelerate::residency;
using support::rank;
using support::world_size;
using testing::HasSubstr;

namespace {

constexpr int64_t kNumel = 12 * kWireBlock, kStretch = 40;

/// The values of the whole flat storage: no two alike, none exact in fewer bits.
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
  return kind == "int8" ? int8_wire() : nullptr;
}

at::Tensor fetched(Home& home, int64_t numel, at::ScalarType type = at::kFloat) {
  at::Tensor flat = torch::full({numel}, std::numeric_limits<float>::quiet_NaN(), type);
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
      const at::Tensor flat = fetched(*home, kNumel);
      EXPECT_TRUE(flat.equal(as_sent(whole, wire.get())));
      if (near) {
        const at::Tensor coarse =
            fetched(*home, kNumel, at::kBFloat16);  // rounded once more, which another encoding would show
        home->keep_for_backward(coarse);
        EXPECT_TRUE(fetched(*home, kNumel, at::kBFloat16).equal(coarse)) << "of neighbours";
      }

      // An operator writes some elements of all; each rank keeps its own.
      const auto before = home->version();
      const at::Tensor some = torch::full({30}, 0.3f);
      home->take(20, some);
      whole.narrow(0, 20, 30).copy_(some);
      EXPECT_TRUE(rank() != 0 || home->version() != before);
      EXPECT_TRUE(fetched(*home, kNumel).equal(as_sent(whole, wire.get())));

      // Code that goes around operators writes one; what it left alone stays as exact as it was.
      at::Tensor raw = fetched(*home, kNumel);
      raw[50] = 0.7f;
      home->store(raw);
      whole[50] = 0.7f;
      at::Tensor kept = torch::zeros({kNumel});
      home->refine(0, kept);
      EXPECT_TRUE(own(kept).equal(own(whole)));
      EXPECT_TRUE(fetched(*home, kNumel).equal(as_sent(whole, wire.get())));
    }
}

TEST(Homes, WholeNumbersOnTheWireAreOffByHalfTheirScale) {
  struct Kind {
    std::unique_ptr<Wire> wire;
    double most, bits, error;
  };
  Kind kinds[] = {{int8_wire(), 127, 8, 0.0070}, {int4_wire(), 7, 4, 0.1266}};
  torch::manual_seed(4);
  for (const Kind& kind : kinds) {
    SCOPED_TRACE(kind.bits);
    for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      const int64_t numel = 3 * kWireBlock;
      const at::Tensor sent = (torch::randn({numel}) * torch::logspace(-3, 3, numel)).to(type);
      const at::Tensor message = kind.wire->encode(sent, 0);
      EXPECT_EQ(message.numel(), kind.wire->bytes(numel));
      EXPECT_EQ(message.numel(), static_cast<int64_t>(static_cast<double>(numel) * kind.bits / 8) + 3 * 2);
      const at::Tensor came = torch::empty({numel});
      kind.wire->decode(message, 0, came);
      for (int64_t from = 0; from < numel; from += kWireBlock) {
        const at::Tensor block = sent.narrow(0, from, kWireBlock).to(at::kFloat);
        const double largest = block.abs().max().item<double>();
        // And what bf16 rounds in a scale.
        EXPECT_LE((came.narrow(0, from, kWireBlock) - block).abs().max().item<double>(),
                  largest * 0.5 / kind.most * (1 + 1.0 / 256));
      }
      // Slices of any number of blocks are the same bytes.
      const int64_t one = kind.wire->bytes(kWireBlock);
      EXPECT_TRUE(kind.wire->encode(sent.narrow(0, kWireBlock, kWireBlock), 0).equal(message.narrow(0, one, one)));
    }
    // As measured for the formulas: relative errors of normal numbers.
    const at::Tensor normal = torch::randn({1024 * kWireBlock}), came = torch::empty_like(normal);
    kind.wire->decode(kind.wire->encode(normal, 0), 0, came);
    EXPECT_NEAR(((came - normal).norm() / normal.norm()).item<double>(), kind.error, 0.02 * kind.error);

    at::Tensor broken = torch::ones({3 * kWireBlock}), heard = torch::empty({3 * kWireBlock});
    broken[3] = std::numeric_limits<float>::infinity();
    broken.narrow(0, 2 * kWireBlock, kWireBlock).fill_(kind.most * 1e-39);  // no inverse of its scale can be had
    kind.wire->decode(kind.wire->encode(broken, 0), 0, heard);
    EXPECT_TRUE(heard.narrow(0, 0, kWireBlock).isnan().all().item<bool>());
    EXPECT_TRUE(torch::allclose(heard.narrow(0, kWireBlock, kWireBlock), torch::ones({kWireBlock}), 0.005));
    EXPECT_TRUE(heard.narrow(0, 2 * kWireBlock, kWireBlock).equal(torch::zeros({kWireBlock})));
  }
}

TEST(Homes, CodesTakeWhatIsWrittenAndKeepTheOtherBlocks) {
  torch::manual_seed(6);
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    SCOPED_TRACE(at::toString(type));
    const int64_t numel = 4 * kWireBlock;
    const auto values = std::make_shared<CodedValues>(numel, type, at::kCPU);
    const auto home = coded_home(values);
    EXPECT_TRUE(fetched(*home, numel).equal(torch::zeros({numel})));
    EXPECT_EQ(home->keeps(), type);
    const auto before = home->version();
    home->take(0, torch::randn({numel}).to(type));
    EXPECT_NE(home->version(), before);
    const at::Tensor first = fetched(*home, numel), coarse = fetched(*home, numel, type);
    const at::Tensor bytes = values->codes().clone();
    EXPECT_EQ(bytes.numel(), numel + 2 * 4) << "a byte each, and scales";

    at::Tensor read = torch::zeros({10}, type);
    home->refine(300, read);
    EXPECT_TRUE(read.equal(coarse.narrow(0, 300, 10)));
    home->store(coarse);
    EXPECT_TRUE(values->codes().equal(bytes)) << "nothing was written";
    home->take(2 * kWireBlock, torch::full({3}, 2.5, type));
    const at::Tensor second = fetched(*home, numel);
    EXPECT_NEAR(second[2 * kWireBlock].item<double>(), 2.5, 0.02);
    for (const int64_t block : {0, 1, 3})
      EXPECT_TRUE(
          second.narrow(0, block * kWireBlock, kWireBlock).equal(first.narrow(0, block * kWireBlock, kWireBlock)))
          << block;
  }
}
