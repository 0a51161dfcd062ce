// Models across devices: operands come to the weights. The meta device stands for another one: what has gone there
// shows by having no values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "residency/homes/host.hpp"
#include "residency/residency.hpp"
#include "residency_support.hpp"

namespace {

using namespace residency_test;
using residency::PartSpec;
using residency::Residency;

/// A linear layer on the host, then one on the meta device, both resident.
struct TwoPlaces {
  TwoPlaces() : engine({.prefetch = 0, .across_devices = true}) {
    for (auto* layer : {&here, &there})
      for (auto& item : (*layer)->named_parameters()) {
        std::vector<PartSpec> parts(1);
        auto& part = parts.front();
        part.members = {{item.key(), item.value()}};
        part.layout = {.offsets = {0}, .numel = item.value().numel()};
        part.device = layer == &there ? at::kMeta : at::kCPU;
        part.home = residency::memory_home(item.value().variable_data().view({-1}).to(part.device));
        engine.add(item.key(), std::move(parts));
      }
  }
  torch::nn::Linear here{4, 4}, there{4, 4};
  Residency engine;
};

TEST(Devices, OperandsComeToTheWeights) {
  const torch::NoGradGuard no_grad;
  TwoPlaces t;
  const auto x = torch::randn({2, 4});
  const auto y = t.here(x);
  EXPECT_TRUE(y.is_cpu());
  const auto z = t.there(y);
  EXPECT_TRUE(z.is_meta());
  EXPECT_EQ(z.sizes(), y.sizes());
}

TEST(Devices, WithoutWeightsOperatorsRunWhereTheThreadLastComputed) {
  const torch::NoGradGuard no_grad;
  TwoPlaces t;
  const auto y = t.here(torch::randn({2, 4}));
  const auto z = t.there(y);
  EXPECT_TRUE((y + z).is_meta()) << "a residual connection";
  EXPECT_TRUE(torch::cat({y, z}).is_meta());
  EXPECT_TRUE((z * torch::tensor(2.0)).is_meta()) << "a number in host memory";
  EXPECT_TRUE((y * 2).is_cpu()) << "on one device it stays there";
}

TEST(Devices, WhatIsWrittenStays) {
  const torch::NoGradGuard no_grad;
  TwoPlaces t;
  auto z = t.there(torch::randn({2, 4}));
  t.here(torch::randn({2, 4}));
  z.add_(torch::ones({2, 4}));
  EXPECT_TRUE(z.is_meta()) << "though the thread last computed on the host";
  EXPECT_TRUE(torch::ones({2, 4}).to(at::kMeta).is_meta());
}

TEST(Devices, GradientsComeBack) {
  TwoPlaces t;
  auto y = t.here(torch::randn({2, 4}));
  // Backward through the meta part has no values to bring back; that the copy is in the graph shows in its function.
  const auto z = t.there(y);
  EXPECT_TRUE(z.requires_grad());
  EXPECT_NE(z.grad_fn(), nullptr);
}

TEST(Devices, EndsWithTheModel) {
  const torch::NoGradGuard no_grad;
  at::Tensor z;
  {
    TwoPlaces t;
    z = t.there(torch::randn({2, 4}));
  }
  EXPECT_TRUE(c10::impl::tls_is_dispatch_key_included(residency::kKey)) << "a thread learns of it by its next operator";
  z = torch::ones({2}) + 1;
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(residency::kKey));
}

}  // namespace
