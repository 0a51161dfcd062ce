/// The scope's promises beyond values: identity, errors, threads, memory, and the interface for sharded engines.

#include <c10/util/ThreadLocalDebugInfo.h>

#include <fstream>
#include <thread>

#include "deferred_support.hpp"
#include "residency/deferred/materialize.hpp"

namespace {

using namespace deferred_test;
namespace nn = torch::nn;
using accelerate::ConfigError;
using accelerate::init_on_device;
using support::message_of;
using testing::AllOf;
using testing::HasSubstr;

Module linears(int64_t count, int64_t size) {
  nn::Sequential all;
  for (int64_t i = 0; i < count; ++i) all->push_back(nn::Linear(size, size));
  return all.ptr();
}

at::Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

/// Bytes that this thread's CPU allocations hold, and the most they held.
class Bytes final : public c10::MemoryReportingInfoBase {
 public:
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
    now += size;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }
  int64_t now = 0, peak = 0;
};
struct CountBytes {
  std::shared_ptr<Bytes> bytes = std::make_shared<Bytes>();
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, bytes};
};

/// Sanitizers keep freed memory for a while; what the process holds says nothing then.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kResidentIsTelling = false;
#else
constexpr bool kResidentIsTelling = true;
#endif

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t total = 0, resident = 0;
  file >> total >> resident;
  return resident * 4096;
}

TEST(DeferredIdentity, OnTheMetaDeviceNothingIsDrawn) {
  nn::Linear model{nullptr};
  {
    const auto scope = init_empty_weights();
    model = nn::Linear(4, 4);
  }
  const auto generator = at::detail::getDefaultCPUGenerator();
  const auto before = generator.get_state();
  materialize(model, {.device = at::kMeta});
  EXPECT_TRUE(model->weight.is_meta());
  EXPECT_FALSE(is_deferred(model->weight));
  EXPECT_TRUE(torch::equal(generator.get_state(), before));
}

TEST(DeferredIdentity, OptimizersTiedWeightsAndHandlesStay) {
  torch::manual_seed(kSeed);
  nn::Linear eager(4, 4);
  torch::manual_seed(kSeed);
  nn::Linear model{nullptr};
  at::Tensor tied, view, data;
  {
    auto scope = init_empty_weights();
    model = nn::Linear(4, 4);
    tied = model->weight;
    data = model->weight.data();
    view = model->weight.detach().narrow(0, 1, 2);
  }
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  materialize(model);
  expect_same(eager->weight, tied, "tied");
  EXPECT_TRUE(torch::equal(view, eager->weight.detach().narrow(0, 1, 2)))
      << "views that nobody knew of become real when they are used";
  EXPECT_TRUE(view.is_alias_of(model->weight));
  EXPECT_EQ(data.sum().item<float>(), eager->weight.sum().item<float>());
  EXPECT_TRUE(data.is_alias_of(model->weight));
  const at::Tensor x = torch::ones({2, 4});
  eager(x).sum().backward();
  model(x).sum().backward();
  EXPECT_TRUE(torch::equal(eager->weight.grad(), model->weight.grad()));
  torch::optim::SGD other(eager->parameters(), 0.1);
  other.step();
  optimizer.step();
  EXPECT_TRUE(torch::equal(eager->weight, tied));
}

TEST(DeferredIdentity, AFreshNodeAccumulatesGradients) {
  nn::Linear model{nullptr};
  {
    auto scope = init_empty_weights();
    model = nn::Linear(3, 2);
  }
  const auto accumulator =
      torch::autograd::impl::grad_accumulator(model->weight);  // as hooks hold it, made for the meta device
  materialize(model);
  model(torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(torch::equal(model->weight.grad(), torch::ones({2, 3})));
}

TEST(DeferredGenerator, DropoutSeesTheSameStateAfterMaterialize) {
  torch::manual_seed(kSeed);
  nn::Sequential eager(nn::Linear(8, 8), nn::Dropout(0.5));
  const at::Tensor expected = eager->forward(torch::ones({4, 8}));
  torch::manual_seed(kSeed);
  auto model = [] {
    auto scope = init_empty_weights();
    return nn::Sequential(nn::Linear(8, 8), nn::Dropout(0.5));
  }();
  materialize(model);
  EXPECT_TRUE(torch::equal(model->forward(torch::ones({4, 8})), expected));
}

TEST(DeferredGenerator, TheScopeItselfDrawsNothing) {
  torch::manual_seed(kSeed);
  const at::Tensor before = generator_state();
  const Module module = build_deferred([] { return linears(3, 4); });
  EXPECT_TRUE(torch::equal(generator_state(), before));
}

TEST(DeferredGenerator, InitialisersAfterTheScopeGoOnWhereItEnded) {
  const auto again = [](nn::Linear& linear) {
    torch::NoGradGuard no_grad;
    linear->weight.normal_();
    linear->bias.fill_(3);
    linear->weight.t()[0].zero_();
  };
  torch::manual_seed(kSeed);
  nn::Linear eager(4, 4);
  again(eager);
  torch::manual_seed(kSeed);
  nn::Linear model{nullptr};
  {
    auto scope = init_empty_weights();
    model = nn::Linear(4, 4);
  }
  again(model);
  EXPECT_TRUE(is_deferred(model->weight));
  materialize(model);
  expect_same(eager.ptr(), model.ptr());
}

TEST(DeferredGenerator, ModulesThrownAwayStillDraw) {
  const Build build = [] {
    linears(2, 8);
    Module kept = nn::Linear(3, 3).ptr();
    linears(1, 4);
    return kept;
  };
  torch::manual_seed(kSeed);
  const Module eager = build();
  const at::Tensor state = generator_state();
  torch::manual_seed(kSeed);
  const Module module = build_deferred(build);
  materialize(module);
  expect_same(eager, module);
  EXPECT_TRUE(torch::equal(generator_state(), state));
}

TEST(DeferredGenerator, MovesWhenTheLastNumberIsDrawn) {
  for (const bool last_first : {false, true}) {
    torch::manual_seed(kSeed);
    const Module a = nn::Linear(3, 3).ptr(), b = nn::Linear(5, 5).ptr();
    const at::Tensor eager_end = generator_state();
    torch::manual_seed(kSeed);
    const at::Tensor begin = generator_state();
    const auto [c, d] = [] {
      auto scope = init_empty_weights();
      Module first = nn::Linear(3, 3).ptr();
      return std::pair(first, nn::Linear(5, 5).ptr());
    }();
    materialize(last_first ? d : c);
    EXPECT_TRUE(torch::equal(generator_state(), last_first ? eager_end : begin));
    materialize(last_first ? c : d);
    EXPECT_TRUE(torch::equal(generator_state(), eager_end));
    expect_same(a, c);
    expect_same(b, d);
  }
}

TEST(DeferredUse, ForwardBeforeMaterializeIsAnError) {
  nn::Linear model{nullptr};
  {
    auto scope = init_empty_weights();
    model = nn::Linear(4, 3);
  }
  const auto text = message_of<ConfigError>([&] { model(torch::ones({2, 4})); });
  EXPECT_THAT(text, AllOf(HasSubstr("parameter [3] float"), HasSubstr("not initialised yet (init_empty_weights"),
                          HasSubstr("materialize(module)")));
  EXPECT_THAT(message_of<ConfigError>([&] { model->weight.sum(); }), HasSubstr("aten::sum"));
  EXPECT_THAT(message_of<ConfigError>([&] { model->weight[0][0].item<float>(); }), HasSubstr("not initialised yet"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                torch::cat({torch::ones({1, 4}), model->weight});
              }),
              HasSubstr("aten::cat"));
  EXPECT_THAT(message_of<ConfigError>([&] { model->to(torch::kCPU); }), HasSubstr("not initialised yet"));
  EXPECT_THAT(message_of<ConfigError>([&] {
                torch::zeros({3, 4}).copy_(model->weight.detach());
              }),
              HasSubstr("aten::copy_"));
  EXPECT_THAT(message_of<c10::Error>([&] { model->weight.data_ptr<float>(); }), HasSubstr("not initialised yet"));
  EXPECT_THAT(message_of<c10::Error>([&] { model->weight.fill_(1); }), HasSubstr("leaf Variable"))
      << "autograd's own checks stay";
  // Sizes and views need no values.
  EXPECT_EQ(model->weight.t().sizes(), at::IntArrayRef({4, 3}));
  EXPECT_EQ(model->weight.numel(), 12);
  EXPECT_TRUE(model->weight.is_contiguous());
  materialize(model);
  EXPECT_EQ(model(torch::ones({2, 4})).sizes(), at::IntArrayRef({2, 3}));
}

TEST(DeferredUse, WeightsAreLoadedIntoDeferredParameters) {
  nn::Linear model{nullptr};
  {
    auto scope = init_empty_weights();
    model = nn::Linear(4, 3);
  }
  model->weight.set_data(torch::full({3, 4}, 2.0));
  EXPECT_FALSE(is_deferred(model->weight));
  EXPECT_FALSE(model->weight.is_meta());
  EXPECT_EQ(model->weight.key_set(), nn::Linear(1, 1)->weight.key_set());
  {
    torch::NoGradGuard no_grad;
    model->bias.copy_(torch::ones({3}));
  }
  EXPECT_FALSE(is_deferred(model->bias));
  EXPECT_TRUE(torch::equal(model(torch::ones({1, 4})), torch::full({1, 3}, 9.0)));
  materialize(model);
  EXPECT_EQ(model->weight.sum().item<float>(), 24) << "nothing left to do";
  nn::Linear(model)->weight.mean().backward();
  EXPECT_TRUE(model->weight.grad().defined());
}

TEST(DeferredUse, AFailedLoadLosesNothing) {
  torch::manual_seed(kSeed);
  const at::Tensor expected = torch::randn({4, 2});
  torch::manual_seed(kSeed);
  const Module module = build_deferred(custom([](Custom& m) { m.parameter("w", torch::randn({4, 2})); }));
  const at::Tensor w = module->parameters()[0];
  EXPECT_THAT(message_of<c10::Error>([&] { w.copy_(torch::ones({4, 2})); }), HasSubstr("leaf Variable"));
  EXPECT_THROW(w.data().copy_(torch::ones({3, 2})), c10::Error);
  materialize(module);
  EXPECT_TRUE(torch::equal(w, expected));
}

TEST(DeferredUse, APartlyLoadedTensorKeepsTheRestOfItsInitialisation) {
  torch::manual_seed(kSeed);
  const at::Tensor expected = torch::randn({4, 2});
  expected[1].fill_(5);
  torch::manual_seed(kSeed);
  const Module module = build_deferred(custom([](Custom& m) { m.parameter("w", torch::randn({4, 2})); }));
  {
    torch::NoGradGuard no_grad;
    module->parameters()[0][1].copy_(torch::full({2}, 5.0));
  }
  EXPECT_TRUE(is_deferred(module->parameters()[0]));
  materialize(module);
  EXPECT_TRUE(torch::equal(module->parameters()[0], expected));
}

TEST(DeferredUse, AModuleIsConvertedAndClonedBeforeItHasValues) {
  torch::manual_seed(kSeed);
  nn::Linear eager(6, 5);
  eager->to(torch::kBFloat16);
  torch::manual_seed(kSeed);
  nn::Linear model{nullptr};
  {
    auto scope = init_empty_weights();
    model = nn::Linear(6, 5);
  }
  model->to(torch::kBFloat16);
  EXPECT_TRUE(is_deferred(model->weight));
  auto copy = std::dynamic_pointer_cast<nn::LinearImpl>(model->clone());
  materialize(copy);
  materialize(model);
  expect_same(eager.ptr(), model.ptr());
  expect_same(eager.ptr(), copy);
  EXPECT_FALSE(copy->weight.is_alias_of(model->weight));
}

TEST(DeferredUse, ATensorThatAnInitialiserReadsMustNotChange) {
  const at::Tensor large = torch::ones({2048}), small = torch::ones({4});
  const Module module = build_deferred(custom([&](Custom& m) { m.parameter("large", torch::zeros({2048}) + large); }));
  const Module small_one = build_deferred(custom([&](Custom& m) { m.parameter("small", torch::zeros({4}) + small); }));
  small.fill_(2);
  large.fill_(2);
  EXPECT_THAT(message_of<ConfigError>([&] { materialize(module); }),
              AllOf(HasSubstr("[2048]"), HasSubstr("aten::add"), HasSubstr("clone()")));
  accelerate::residency::materialize_each(
      ModelRef(small_one), at::kCPU, [](const std::string&, const at::Tensor&, const at::Tensor& value) {
        EXPECT_TRUE(torch::equal(value, torch::ones({4}))) << "small ones are copied at once";
      });
}

TEST(DeferredUse, WhatIsOverwrittenIsNotWorkedOut) {
  const at::Tensor large = torch::ones({2048});
  const Module module = build_deferred(custom([&](Custom& m) {
    auto w = m.parameter("w", torch::zeros({2048}) + large);
    torch::NoGradGuard no_grad;
    w.fill_(3);
  }));
  large.fill_(2);  // would be an error if anybody read it
  materialize(module);
  EXPECT_EQ(module->parameters()[0].sum().item<float>(), 3 * 2048);
}

TEST(DeferredUse, ItemInTheScopeTouchesOnlyWhatItNeeds) {
  float value = 0;
  CountBytes count;
  torch::manual_seed(kSeed);
  const Module module = build_deferred(custom([&](Custom& m) {
    m.parameter("large", torch::zeros({1 << 22}));
    value = (torch::full({3}, 2.0) * 4).sum().item<float>();
  }));
  EXPECT_EQ(value, 24);
  EXPECT_LT(count.bytes->peak, 1 << 16);
  EXPECT_THROW(build_deferred(custom([](Custom&) {
                 torch::randn({2, 3}).matmul(torch::randn({2, 3}));
               })),
               c10::Error)
      << "a wrong call is wrong at once";
}

TEST(DeferredScope, ExceptionsLeaveTheThreadClean) {
  const auto build = [] {
    return build_deferred([]() -> Module {
      linears(1, 4);
      throw std::runtime_error("constructor");
    });
  };
  EXPECT_EQ(message_of<std::runtime_error>(build), "constructor");
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::DeferredInit));
  EXPECT_FALSE(torch::zeros({2}).is_meta());
  EXPECT_EQ(torch::rand({2}).sum().device(), at::Device(at::kCPU));
}

TEST(DeferredScope, TheInnermostScopeDecides) {
  torch::manual_seed(kSeed);
  const Module a = nn::BatchNorm1d(4).ptr(), b = nn::Linear(4, 4).ptr(), c = nn::Linear(2, 2).ptr();
  torch::manual_seed(kSeed);
  Module d, e, f, with_buffers, real;
  {
    auto outer = init_empty_weights();
    d = nn::BatchNorm1d(4).ptr();
    {
      auto inner = init_empty_weights({.include_buffers = true});
      e = nn::Linear(4, 4).ptr();
      with_buffers = nn::BatchNorm1d(nn::BatchNormOptions(4).affine(false)).ptr();
    }
    {
      auto inner = init_on_device(at::kCPU);
      real = nn::BatchNorm1d(4).ptr();
    }
    EXPECT_TRUE(is_deferred(d->buffers()[0]));
    EXPECT_FALSE(is_deferred(real->parameters()[0]));
    EXPECT_FALSE(real->parameters()[0].is_meta());
    f = nn::Linear(2, 2).ptr();
  }
  EXPECT_FALSE(is_deferred(d->buffers()[0]));
  EXPECT_TRUE(is_deferred(d->parameters()[0]));
  EXPECT_TRUE(is_deferred(with_buffers->buffers()[0]));
  for (const Module& module : {f, with_buffers, e, d}) materialize(module);
  expect_same(a, d);
  expect_same(b, e);
  expect_same(c, f);
}

TEST(DeferredScope, ModulesOfDifferentScopesShareTensors) {
  torch::manual_seed(kSeed);
  nn::Linear eager(3, 3);
  torch::manual_seed(kSeed);
  nn::Linear first{nullptr}, second{nullptr};
  {
    auto scope = init_empty_weights();
    first = nn::Linear(3, 3);
  }
  torch::manual_seed(7);
  {
    auto scope = init_empty_weights();
    second = nn::Linear(3, 3);
    torch::NoGradGuard no_grad;
    second->weight.copy_(first->weight);
  }
  materialize(second);
  materialize(first);
  EXPECT_TRUE(torch::equal(first->weight, eager->weight));
  EXPECT_TRUE(torch::equal(second->weight, eager->weight));
}

TEST(DeferredScope, ThreadsBuildAtOnce) {
  std::vector<Module> eager(4), built(4);
  const auto build = [](size_t i) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(i);
    Module module = nn::Sequential(nn::LSTM(8, 16), nn::BatchNorm1d(8)).ptr();
    torch::NoGradGuard no_grad;
    for (auto& parameter : module->parameters())
      parameter.normal_(0, 1, generator);  // the default generator is everybody's
    return module;
  };
  for (size_t i = 0; i < 4; ++i) eager[i] = build(i);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 10; ++repeat) {
        built[i] = build_deferred([&] { return build(i); });
        materialize(built[i]);
      }
      EXPECT_FALSE(torch::zeros({1}).is_meta());
    });
  for (auto& thread : threads) thread.join();
  for (size_t i = 0; i < 4; ++i) expect_same(eager[i], built[i]);
}

TEST(DeferredScope, ThreadsReplayFromTheSameDefaultGenerator) {
  torch::manual_seed(kSeed);
  const Module eager = linears(40, 128);
  torch::manual_seed(kSeed);
  std::vector<Module> built(4);
  for (auto& module : built) module = build_deferred([] { return linears(40, 128); });
  std::vector<std::thread> threads;
  for (auto& module : built) threads.emplace_back([&module] { materialize(module); });
  for (auto& thread : threads) thread.join();
  for (const auto& module : built) expect_same(eager, module);
}

TEST(DeferredScope, OneThreadBuildsAnotherMaterialises) {
  torch::manual_seed(kSeed);
  const Module eager = linears(2, 4);
  torch::manual_seed(kSeed);
  Module module;
  std::thread([&] { module = build_deferred([] { return linears(2, 4); }); }).join();
  materialize(module);
  expect_same(eager, module);
}

TEST(InitOnMeta, FactoriesGoThere) {
  Module meta, cpu;
  {
    auto scope = init_on_device(at::kMeta);
    meta = nn::Sequential(nn::Linear(3, 3), nn::BatchNorm1d(3)).ptr();
  }
  for (const auto& [name, tensor] : ModelRef(meta).state()) {
    EXPECT_TRUE(tensor.is_meta()) << name;
    EXPECT_FALSE(is_deferred(tensor)) << name;
  }
  torch::manual_seed(kSeed);
  const Module eager = nn::Linear(3, 3).ptr();
  torch::manual_seed(kSeed);
  {
    auto scope = init_on_device(at::kCPU);
    cpu = nn::Linear(3, 3).ptr();
  }
  expect_same(eager, cpu);
  EXPECT_FALSE(torch::zeros({1}).is_meta());
}

// ---- For sharded engines

TEST(MaterializeEach, GivesEveryParameterOnceInTapeOrder) {
  torch::manual_seed(kSeed);
  const Build build = [] {
    const Module kept = linears(3, 5);
    linears(1, 4);
    return kept;
  };
  const Module eager = build();
  const at::Tensor state = generator_state();
  torch::manual_seed(kSeed);
  const Module module = build_deferred(build);
  std::vector<std::string> names;
  const auto expected = eager->named_parameters();
  accelerate::residency::materialize_each(ModelRef(module), at::kCPU,
                                          [&](const std::string& name, const at::Tensor& parameter, at::Tensor value) {
                                            names.push_back(name);
                                            EXPECT_TRUE(is_deferred(parameter));
                                            EXPECT_FALSE(is_deferred(value));
                                            EXPECT_TRUE(torch::equal(value, expected[name])) << name;
                                            EXPECT_EQ(value.strides(), parameter.strides());
                                          });
  EXPECT_EQ(names, expected.keys());
  EXPECT_TRUE(torch::equal(generator_state(), state));
  materialize(module);  // nobody took them: they can still be had
  expect_same(eager, module);
}

TEST(MaterializeEach, HoldsOneParameterAndWhatIsKept) {
  constexpr int64_t kSize = 3000, kLayers = 6,
                    kWeight =
                        kSize * kSize * 4;  // 6 x 36 MB; more than 32 MB, so that malloc gives freed ones back at once
  const Module module = build_deferred([] {
    const Module all = linears(kLayers, kSize);
    torch::NoGradGuard no_grad;
    for (auto& parameter : all->parameters())
      parameter.normal_(0, 0.02);  // second pass: the first one's values are never needed, its numbers are
    return all;
  });
  std::vector<at::Tensor> shards;
  int64_t kept = 0;
  CountBytes count;
  const int64_t resident = resident_bytes();
  int64_t resident_peak = 0;
  accelerate::residency::materialize_each(ModelRef(module), at::kCPU,
                                          [&](const std::string&, const at::Tensor&, at::Tensor value) {
                                            resident_peak = std::max(resident_peak, resident_bytes() - resident);
                                            shards.push_back(value.flatten().slice(0, 0, value.numel() / 4).clone());
                                            kept += shards.back().numel() * 4;
                                          });
  RecordProperty("peak_bytes", std::to_string(count.bytes->peak));
  std::printf("peak %.1f MB counted, %.1f MB resident; kept %.1f MB, one parameter %.1f MB\n", count.bytes->peak / 1e6,
              resident_peak / 1e6, kept / 1e6, kWeight / 1e6);
  EXPECT_LE(count.bytes->peak, kept + kWeight + (1 << 20));  // 1 MiB: generator states (5 KB each) and biases
  if (kResidentIsTelling) {
    EXPECT_LE(resident_peak, kept + kWeight + (24 << 20))
        << "the process holds little else (24 MiB: allocator, thread pool)";
  }
}

TEST(MaterializeEach, AnErrorOfTheCallbackEndsIt) {
  torch::manual_seed(kSeed);
  const Module eager = linears(2, 3);
  torch::manual_seed(kSeed);
  const Module module = build_deferred([] { return linears(2, 3); });
  int64_t calls = 0;
  const auto take = [&](const std::string&, const at::Tensor&, const at::Tensor&) {
    if (++calls == 2) throw std::runtime_error("full");
  };
  EXPECT_EQ(message_of<std::runtime_error>(
                [&] { accelerate::residency::materialize_each(ModelRef(module), at::kCPU, take); }),
            "full");
  materialize(module);
  expect_same(eager, module);
}

TEST(DeferredSize, EightyBillionParametersInFiftyMegabytes) {
  std::vector<nn::Linear> layers;
  layers.reserve(500);
  const int64_t before = resident_bytes();
  {
    auto scope = init_empty_weights();
    for (int i = 0; i < 500; ++i) layers.emplace_back(12800, 12800);
  }
  const int64_t bytes = resident_bytes() - before;
  std::printf("%.1f billion parameters in %.1f MB, %.1f KB a tensor\n", 500 * 12800.0 * 12801 / 1e9, bytes / 1e6,
              bytes / 1e3 / 1000);
  EXPECT_LT(bytes, 50'000'000);
}

TEST(DeferredSize, NothingIsLeftWhenTheModuleGoes) {
  build_deferred([] { return linears(50, 64); });
  const int64_t before = resident_bytes();
  for (int i = 0; i < 200; ++i) build_deferred([] { return linears(50, 64); });
  if (kResidentIsTelling) {
    EXPECT_LT(resident_bytes() - before, 8'000'000) << "200 tapes of some 200 KB each";
  }
}

}  // namespace
