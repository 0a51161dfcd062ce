/// The chain of handlers, and that it carries what is to come: kernels that compute on codes, and operators on shares.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "residency/chain.hpp"
#include "residency/member.hpp"
#include "residency_support.hpp"

namespace {

using namespace residency_test;
using residency::Handler;
using residency::HandlerScope;
using residency::Link;
using residency::Member;
using residency::Next;
using residency::OperatorCall;
using residency::ProcessHandler;
using residency::Residency;
using residency::State;

/// As quantized products will: `addmm` with the (transposed) member `weight` is computed from its codes, which a table
/// has; no other operator is any of its business.
struct ProductOnCodes final : Handler {
  struct Encoded {
    at::Tensor codes;  ///< [out, in] int8
    float scale;
  };
  bool handle(OperatorCall& call, Next) override {
    if (call.name() != "aten::addmm") return false;
    const auto found = table.find(Member::of(call.arguments()[2].toTensor()));
    if (found == table.end()) return false;
    const at::Tensor bias = call.arguments()[0].toTensor(), input = call.arguments()[1].toTensor();
    const auto& [codes, scale] = found->second;
    ++products;
    call.finish({torch::matmul(input, codes.to(input.scalar_type()).t()) * scale + bias});
    return true;
  }
  std::map<const Member*, Encoded> table;
  int products = 0;
};

/// Linear(4, 3) whose weight and bias are a unit each.
struct QuantizedLinear {
  QuantizedLinear() {
    const torch::NoGradGuard no_grad;
    codes = torch::randint(-8, 8, {3, 4}, torch::kInt8);
    linear->weight.copy_(codes * 0.5f);
    linear->bias.fill_(3);
    const auto add = [&](const std::string& name, const at::Tensor& tensor, CountingHome*& home) {
      return &add_unit(engine, name, {{name, tensor}}, [&](at::Tensor bytes) {
        auto made = std::make_unique<CountingHome>(std::move(bytes));
        home = made.get();
        return made;
      });
    };
    weight = add("weight", linear->weight, weight_home);
    bias = add("bias", linear->bias, bias_home);
    kernels.table[Member::of(linear->weight)] = {codes, 0.5f};
  }
  torch::nn::Linear linear{4, 3};
  Residency engine{{.prefetch = 0}};
  at::Tensor codes;
  residency::Unit *weight = nullptr, *bias = nullptr;
  CountingHome *weight_home = nullptr, *bias_home = nullptr;
  ProductOnCodes kernels;
};

TEST(Chain, AKernelOnCodesLeavesTheUnitAbsent) {
  const torch::NoGradGuard no_grad;
  QuantizedLinear t;
  const at::Tensor x = torch::randint(-4, 4, {2, 4}).to(torch::kFloat);
  at::Tensor on_codes;
  {
    const ProcessHandler registered(Link::codes, t.kernels);
    on_codes = t.linear(x);
    EXPECT_EQ(t.kernels.products, 1);
    EXPECT_EQ(t.weight->state(), State::absent);
    EXPECT_EQ(t.weight_home->fetches, 0);
    EXPECT_EQ(t.bias->state(), State::resident) << "what the kernel itself uses faults in as ever";
    EXPECT_EQ(torch::sum(t.linear->weight).item<float>(), torch::sum(t.codes).item<int64_t>() * 0.5f)
        << "no kernel: decoded";
    EXPECT_EQ(t.weight_home->fetches, 1);
  }
  EXPECT_TRUE(torch::equal(t.linear(x), on_codes)) << "integers and halves: exact either way";
  EXPECT_EQ(t.kernels.products, 1) << "without the registration nobody asks it";
}

TEST(Chain, AProcessHandlerServesAllThreads) {
  QuantizedLinear t;
  const ProcessHandler registered(Link::codes, t.kernels);
  std::thread([&] {
    const torch::NoGradGuard no_grad;
    t.linear(torch::ones({1, 4}));
  }).join();
  EXPECT_EQ(t.kernels.products, 1);
  EXPECT_EQ(t.weight->state(), State::absent);
}

/// As tensor parallelism will: a tensor of full size of which this rank has half of the columns. `relu` stays on the
/// share, what has no rule gathers first. The other rank's share is this one's plus a hundred.
struct HalfOfTheColumns final : Handler {
  bool handle(OperatorCall& call, Next next) override {
    const bool stays = call.name() == "aten::relu" || call.name() == "aten::relu_";
    const std::vector<c10::IValue> originals = call.arguments().vec();
    bool ours = false;
    call.map_tensors([&](const at::Tensor& tensor) {
      const auto found = shares.find(tensor.unsafeGetTensorImpl());
      if (found == shares.end()) return tensor;
      ours = true;
      const at::Tensor& share = found->second.first;
      return stays ? share : torch::cat({share, share + 100}, 1);
    });
    if (!ours || !stays) return false;
    next();
    call.map_results([&](const at::Tensor& share) { return whole(share); });
    call.put_back(originals);
    return true;
  }
  /// [rows, 2 * columns] without bytes, for a share [rows, columns].
  at::Tensor whole(const at::Tensor& share) {
    at::Tensor handle = torch::empty({0}, share.options());
    auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(handle.storage()),
                                                     handle.key_set().add(residency::kKey), share.dtype());
    impl->set_sizes_contiguous({share.size(0), 2 * share.size(1)});
    handle = at::Tensor(std::move(impl));
    shares[handle.unsafeGetTensorImpl()] = {share, handle};
    return handle;
  }
  std::map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> shares;  ///< handle -> share, and what keeps it
};

TEST(Chain, AHandlerRewritesInputsAndOutputs) {
  const torch::NoGradGuard no_grad;
  HalfOfTheColumns half;
  const ProcessHandler registered(Link::shard, half);
  at::Tensor x = half.whole(torch::tensor({{-1.0f, 2.0f}, {3.0f, -4.0f}}));
  const at::Tensor y = torch::relu(x);
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{2, 4}));
  ASSERT_TRUE(half.shares.contains(y.unsafeGetTensorImpl())) << "a rule: the result is a share again";
  EXPECT_TRUE(torch::equal(half.shares[y.unsafeGetTensorImpl()].first, torch::tensor({{0.0f, 2.0f}, {3.0f, 0.0f}})));
  EXPECT_TRUE(torch::equal(y + 1, torch::tensor({{1.0f, 3.0f, 101.0f, 103.0f}, {4.0f, 1.0f, 104.0f, 101.0f}})))
      << "no rule: gathered";
  EXPECT_TRUE(torch::relu_(x).is_same(x)) << "in place, the program gets its own tensor back";
  EXPECT_TRUE(torch::equal(torch::cat({x, x})[2], torch::tensor({0.0f, 2.0f, 100.0f, 102.0f}))) << "in lists too";
}

/// Writes down its name and goes on, or calls the rest itself.
struct Scribe final : Handler {
  Scribe(std::string name, std::vector<std::string>& order, bool around = false)
      : name(std::move(name)), order(order), around(around) {}
  bool handle(OperatorCall&, Next next) override {
    order.push_back(name);
    if (!around) return false;
    next();
    order.push_back("after " + name);
    return true;
  }
  const std::string name;
  std::vector<std::string>& order;
  const bool around;
};

TEST(Chain, HandlersAreAskedInTheOrderOfTheLinksAndFormLayers) {
  std::vector<std::string> order;
  Scribe place("place", order, true), shard("shard", order), codes("codes", order, true), devices("devices", order);
  const at::Tensor x = torch::ones({2});
  {
    const HandlerScope d(Link::devices, devices), c(Link::codes, codes), p(Link::place, place), s(Link::shard, shard);
    torch::neg(x);
  }
  EXPECT_THAT(order, testing::ElementsAre("place", "shard", "codes", "devices", "after codes", "after place"));
  torch::neg(x);
  EXPECT_EQ(order.size(), 6) << "the scopes have ended";
}

TEST(Chain, TheInnermostScopeCountsAndALinkHasOneHandlerOfTheProcess) {
  std::vector<std::string> order;
  Scribe outer("outer", order), inner("inner", order), everywhere("everywhere", order), other("other", order);
  const ProcessHandler registered(Link::shard, everywhere), again(Link::shard, everywhere);
  EXPECT_THAT(support::message_of<accelerate::InternalError>([&] { const ProcessHandler second(Link::shard, other); }),
              testing::HasSubstr("has a handler already"));
  const at::Tensor x = torch::ones({2});
  {
    const HandlerScope first(Link::shard, outer);
    {
      const HandlerScope second(Link::shard, inner);
      torch::neg(x);
    }
    torch::neg(x);
  }
  torch::neg(x);
  EXPECT_THAT(order, testing::ElementsAre("inner", "outer")) << "plain tensors come by in scopes only";
}

}  // namespace
