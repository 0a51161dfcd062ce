/// The chain of handlers: its lists, the operators that handlers run themselves, and backward; and that it carries what
/// is to come: kernels that compute on codes, and operators on shares.

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <thread>

#include "accelerate/residency/recompute.hpp"
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
using residency::OwnLinks;
using residency::ProcessHandler;
using residency::Residency;
using residency::State;
using residency::TorchLayers;

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

TEST(Chain, ALinkHasAListOfWhichEachIsAsked) {
  std::vector<std::string> order;
  Scribe outer("outer", order), inner("inner", order, true), first("first", order), second("second", order);
  std::optional<ProcessHandler> registered(std::in_place, Link::shard, first);
  const ProcessHandler later(Link::shard, second), again(Link::shard, second);
  const at::Tensor x = torch::ones({2});
  {
    const HandlerScope around(Link::shard, outer);
    {
      const HandlerScope within(Link::shard, inner);
      torch::neg(x);
    }
    EXPECT_THAT(order, testing::ElementsAre("inner", "outer", "first", "second", "after inner"))
        << "scopes, the innermost first, then the process's in the order of registration, each once";
    order.clear();
    registered.reset();
    torch::neg(x);
    EXPECT_THAT(order, testing::ElementsAre("outer", "second"));
    order.clear();
    registered.emplace(Link::shard, first);
    torch::neg(x);
    EXPECT_THAT(order, testing::ElementsAre("outer", "second", "first"));
  }
  order.clear();
  torch::neg(x);
  EXPECT_TRUE(order.empty()) << "plain tensors come by in scopes only";
}

TEST(Chain, WhoMakesTheResultIsTheLastOfItsList) {
  struct Answers final : Handler {
    bool handle(OperatorCall& call, Next) override { return call.finish({result}), true; }
    at::Tensor result = torch::zeros({1});
  } answers;
  std::vector<std::string> order;
  Scribe everywhere("everywhere", order), before("before", order);
  const ProcessHandler registered(Link::shard, everywhere);
  const HandlerScope outer(Link::shard, answers), inner(Link::shard, before);
  EXPECT_EQ(torch::neg(torch::ones({2})).numel(), 1);
  EXPECT_THAT(order, testing::Each("before"));
}

TEST(Chain, ScopesEndInAnyOrder) {
  std::vector<std::string> order;
  Scribe a("a", order), b("b", order);
  std::optional<HandlerScope> first(std::in_place, Link::shard, a), second(std::in_place, Link::shard, b);
  first.reset();
  torch::neg(torch::ones({2}));
  EXPECT_THAT(order, testing::Contains("b"));
  EXPECT_THAT(order, testing::Not(testing::Contains("a")));
  second.reset();
  order.clear();
  torch::neg(torch::ones({2}));
  EXPECT_TRUE(order.empty());
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(residency::kKey));
}

/// Runs an operator of its own before each operator, and says what was switched on meanwhile.
struct RunsItsOwn final : Handler {
  RunsItsOwn(TorchLayers layers, OwnLinks links) : layers(layers), links(links) {}
  bool handle(OperatorCall&, Next next) override {
    next.compute(layers, links, [&] {
      gradients = at::GradMode::is_enabled();
      inference = c10::InferenceMode::is_enabled();
      autograd = !c10::impl::tls_is_dispatch_keyset_excluded(c10::autograd_dispatch_keyset);
      autocast = !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutocastCPU);
      own = torch::mul(factor, torch::full({}, 2.0f));
    });
    return false;
  }
  const TorchLayers layers;
  const OwnLinks links;
  at::Tensor factor = torch::ones({2}, torch::requires_grad()), own;
  bool gradients = false, inference = false, autograd = false, autocast = false;
};

TEST(Chain, OwnOperatorsComeByTheLaterLinksOnly) {
  const at::Tensor x = torch::ones({2});
  for (const OwnLinks links : {OwnLinks::none, OwnLinks::homes, OwnLinks::later}) {
    std::vector<std::string> order;
    Scribe place("place", order), same("same", order), later("later", order);
    RunsItsOwn own(TorchLayers::program, links);
    {
      const HandlerScope p(Link::place, place), s(Link::shard, same), o(Link::shard, own), l(Link::devices, later);
      torch::neg(x);
    }
    const auto heard = std::count(order.begin(), order.end(), "later");
    EXPECT_EQ(std::count(order.begin(), order.end(), "place"), 1);
    EXPECT_EQ(std::count(order.begin(), order.end(), "same"), 1) << "nor the others on its link";
    if (links == OwnLinks::later) EXPECT_GT(heard, 1);
    else EXPECT_EQ(heard, 1) << "no member is among the arguments";
  }
}

TEST(Chain, OwnOperatorsFetchTheMembersThatTheyNeed) {
  QuantizedLinear t;
  RunsItsOwn own(TorchLayers::no_gradients, OwnLinks::later), at_home(TorchLayers::no_gradients, OwnLinks::homes);
  own.factor = at_home.factor = t.linear->bias;
  for (RunsItsOwn* handler : {&own, &at_home}) {
    t.engine.release();
    ASSERT_EQ(t.bias->state(), State::absent);
    const HandlerScope scope(Link::shard, *handler);
    torch::neg(torch::ones({2}));
    EXPECT_EQ(t.bias->state(), State::resident);
    EXPECT_TRUE(torch::equal(handler->own, torch::full({3}, 6.0f)));
  }
}

TEST(Chain, ComputeSaysWhichLayersAreOn) {
  const auto run = [](TorchLayers layers) {
    auto own = std::make_unique<RunsItsOwn>(layers, OwnLinks::later);
    const HandlerScope scope(Link::shard, *own);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    torch::neg(torch::ones({2}));
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return own;
  };
  const auto program = run(TorchLayers::program), chosen = run(TorchLayers::no_autocast),
             plain = run(TorchLayers::no_gradients), kernels = run(TorchLayers::kernels);
  EXPECT_TRUE(program->gradients && program->autograd && program->autocast && program->own.requires_grad());
  EXPECT_TRUE(chosen->gradients && chosen->autograd && !chosen->autocast && chosen->own.requires_grad());
  EXPECT_TRUE(!plain->gradients && !plain->autocast && !plain->own.requires_grad());
  EXPECT_TRUE(!kernels->autograd && !kernels->autocast && !kernels->own.requires_grad());
  EXPECT_TRUE(at::GradMode::is_enabled()) << "as the program had it";
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(run(TorchLayers::program)->inference);
    const auto normal = run(TorchLayers::no_gradients);
    EXPECT_FALSE(normal->inference);
    EXPECT_FALSE(normal->own.is_inference());
    EXPECT_TRUE(c10::InferenceMode::is_enabled());
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;  // as in a kernel that LibTorch runs below autograd
    EXPECT_FALSE(run(TorchLayers::program)->own.requires_grad());
    EXPECT_TRUE(run(TorchLayers::gradients)->own.requires_grad());
  }
}

/// Multiplies what `relu` gives, in the first run and, by a handler of its own, in the second one.
struct Doubles final : Handler {
  Doubles(float factor, std::vector<std::string>& order, std::string name = "first run")
      : factor(factor), order(order), name(std::move(name)) {}
  bool handle(OperatorCall& call, Next next) override {
    if (call.name() != "aten::relu") return false;
    order.push_back(name);
    next();
    next.compute(TorchLayers::program, [&] { call.map_results([&](const at::Tensor& y) { return y.mul(factor); }); });
    return true;
  }
  std::shared_ptr<Handler> for_replay() override { return std::make_shared<Doubles>(factor, order, "again"); }
  const float factor;
  std::vector<std::string>& order;
  const std::string name;
};

TEST(Chain, WhatRunsAgainInBackwardFindsTheScopesOfItsFirstRun) {
  for (const Link link : {Link::place, Link::adapt, Link::codes}) {
    std::vector<std::string> order, others;
    const at::Tensor w = torch::full({1}, 3.0f, torch::requires_grad());
    at::Tensor loss;
    {
      Doubles doubles(2, order);
      const HandlerScope scope(link, doubles);
      loss = accelerate::checkpoint([](const at::Tensor& x) { return torch::relu(x) * x; }, {}, w).sum();
    }
    EXPECT_EQ(loss.item<float>(), 18);
    std::thread([&] {
      Scribe stranger("stranger", others);
      const HandlerScope scope(link, stranger);
      loss.backward();
      EXPECT_THAT(order, testing::ElementsAre("first run", "again")) << "though its scope has ended, on another thread";
      const size_t heard = others.size();
      torch::neg(w.detach());
      EXPECT_GT(others.size(), heard) << "a scope of this thread is asked again afterwards";
    }).join();
    EXPECT_EQ(w.grad().item<float>(), 12) << "of 2 x x";
  }
}

TEST(Chain, WhatRunsAgainInBackwardDoesNotComeByScopesOfAnotherForward) {
  std::vector<std::string> order, others;
  const at::Tensor w = torch::full({1}, 3.0f, torch::requires_grad());
  const at::Tensor loss = accelerate::checkpoint([](const at::Tensor& x) { return torch::relu(x) * x; }, {}, w).sum();
  Doubles doubles(2, others);
  const HandlerScope scope(Link::codes, doubles);
  loss.backward();
  EXPECT_TRUE(others.empty());
  EXPECT_EQ(w.grad().item<float>(), 6);
}

TEST(Chain, HandlersOfTheProcessAreAskedInBackwardOnEveryThread) {
  QuantizedLinear t;
  std::vector<std::string> order;
  Scribe everywhere("everywhere", order);
  const at::Tensor x = torch::ones({1, 4}, torch::requires_grad());
  const at::Tensor loss = t.linear(x).sum();
  const ProcessHandler registered(Link::shard, everywhere);
  std::thread([&] { loss.backward(); }).join();
  EXPECT_FALSE(order.empty()) << "backward multiplies by the member";
}

}  // namespace
