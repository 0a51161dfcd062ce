/// Operations of a forward, by module: what each operator costs, and whose it is.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "profiler/module_profile.hpp"

namespace {

using accelerate::profiler::ModuleCost;
using accelerate::profiler::ModuleProfile;
using accelerate::profiler::ProfiledModule;
using testing::HasSubstr;

ModuleCost cost_of(const std::function<void()>& body) {
  ModuleProfile profile({ProfiledModule{.name = "", .class_name = "Model", .settings = ""}}, at::kCPU);
  profile.start();
  body();
  profile.stop();
  return profile.costs().front();
}
std::pair<int64_t, int64_t> flops_and_macs(const std::function<void()>& body) {
  const auto cost = cost_of(body);
  return {cost.flops, cost.macs};
}
using Pair = std::pair<int64_t, int64_t>;

TEST(OperatorFlops, ProductsAreTwoOperationsForEachMultiplication) {
  const auto a = torch::randn({2, 3}), b = torch::randn({3, 5});
  EXPECT_EQ(flops_and_macs([&] { a.matmul(b); }), Pair(60, 30));
  EXPECT_EQ(flops_and_macs([&] { torch::mm(a, b); }), Pair(60, 30));
  EXPECT_EQ(flops_and_macs([&] { a.mv(b.select(1, 0)); }), Pair(12, 6));
  EXPECT_EQ(flops_and_macs([&] { torch::randn({3}).dot(torch::randn({3})); }), Pair(6, 3));
  EXPECT_EQ(flops_and_macs([&] { torch::addmm(torch::randn({2, 5}), a, b); }), Pair(60 + 10, 30));
  EXPECT_EQ(flops_and_macs([&] { torch::addmm(torch::randn({5}), a, b); }), Pair(60, 30)) << "a layer's bias";
  EXPECT_EQ(flops_and_macs([&] { torch::bmm(torch::randn({4, 2, 3}), torch::randn({4, 3, 5})); }), Pair(240, 120));
  EXPECT_EQ(flops_and_macs([&] { torch::matmul(torch::randn({4, 2, 3}), b); }), Pair(240, 120));
  EXPECT_EQ(flops_and_macs([&] { torch::matmul(a, torch::randn({4, 3, 5})); }), Pair(240, 120)) << "broadcast";
  EXPECT_EQ(flops_and_macs([&] { torch::einsum("ij,jk->ik", {a, b}); }), Pair(60, 30));
  EXPECT_EQ(flops_and_macs([&] {
              torch::linear(torch::randn({4, 2, 3}), torch::randn({7, 3}), torch::randn({7}));
            }),
            Pair(2 * 168, 168));
}

TEST(OperatorFlops, ConvolutionsMeetEachWeightAtEachPlace) {
  const auto x = torch::randn({2, 4, 8, 8});
  // 6 of 4 channels and 3 x 3, at 4 x 4 places of 2 samples.
  EXPECT_EQ(flops_and_macs([&] {
              torch::conv2d(x, torch::randn({6, 4, 3, 3}), {}, 2, 1);
            }),
            Pair(2 * 6912, 6 * 4 * 9 * 16 * 2));
  EXPECT_EQ(flops_and_macs([&] {
              torch::conv2d(x, torch::randn({6, 4, 3, 3}), torch::randn({6}), 2, 1);
            }),
            Pair(2 * 6912 + 6 * 16 * 2, 6912));
  EXPECT_EQ(flops_and_macs([&] {
              torch::conv2d(x, torch::randn({4, 1, 3, 3}), {}, 1, 1, 1, 4);
            }),
            Pair(2 * 4608, 4 * 9 * 64 * 2))
      << "each channel by itself";
  EXPECT_EQ(flops_and_macs([&] {
              torch::conv1d(torch::randn({2, 3, 10}), torch::randn({5, 3, 3}));
            }),
            Pair(2 * 720, 5 * 3 * 3 * 8 * 2));
  EXPECT_EQ(flops_and_macs([&] {
              torch::conv_transpose1d(torch::randn({2, 3, 10}), torch::randn({3, 5, 4}), torch::randn({5}));
            }),
            Pair(2 * 1200 + 5 * 13 * 2, 3 * 5 * 4 * 10 * 2));
}

TEST(OperatorFlops, AttentionNormsAndTheRest) {
  const auto q = torch::randn({2, 3, 4, 8}), k = torch::randn({2, 3, 5, 8}), v = torch::randn({2, 3, 5, 6});
  EXPECT_EQ(flops_and_macs([&] { torch::scaled_dot_product_attention(q, k, v); }), Pair(2 * 1680, 24 * 5 * (8 + 6)));
  const auto x = torch::randn({2, 4, 6});
  EXPECT_EQ(flops_and_macs([&] { torch::layer_norm(x, {6}, torch::ones({6}), torch::zeros({6})); }), Pair(5 * 48, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::layer_norm(x, {6}); }), Pair(4 * 48, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::group_norm(x, 2, torch::ones({4})); }), Pair(5 * 48, 0));
  const auto norm = [&](bool training) {
    return flops_and_macs([&] {
      torch::batch_norm(x, torch::ones({4}), torch::zeros({4}), torch::zeros({4}), torch::ones({4}), training, 0.1,
                        1e-5, false);
    });
  };
  EXPECT_EQ(norm(true), Pair(5 * 48, 0));
  EXPECT_EQ(norm(false), Pair(2 * 48, 0));
  EXPECT_EQ(flops_and_macs([&] { x.softmax(-1); }), Pair(48, 0));
  EXPECT_EQ(flops_and_macs([&] { x.relu(); }), Pair(48, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::gelu(x); }), Pair(48, 0));
  EXPECT_EQ(flops_and_macs([&] { x.add(torch::randn({6})); }), Pair(48, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::randn({6}).mul(x); }), Pair(48, 0)) << "as many as the result has";
  EXPECT_EQ(flops_and_macs([&] { torch::max_pool1d(x, 2); }), Pair(48, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::upsample_nearest1d(x, {12}); }), Pair(96, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::dropout(x, 0.5, true); }), Pair(0, 0));
  EXPECT_EQ(flops_and_macs([&] { torch::embedding(torch::randn({9, 4}), torch::arange(3)); }), Pair(0, 0));
  // 2 samples of 3 steps: matrices of 4 * 5 x 4 and 4 * 5 x 5, two biases, and ten operations for each element of a
  // state.
  torch::nn::LSTM lstm(4, 5);
  const int64_t rows = 3 * 2;
  EXPECT_EQ(flops_and_macs([&] {
              lstm(torch::randn({3, 2, 4}));
            }),
            Pair(rows * (2 * 80 - 20 + 2 * 100 - 20 + 2 * 20 + 10 * 5), rows * (80 + 100)));
}

/// 0: root, 1: body, 2: body.first, 3: body.act, 4: body.second, 5: body.last, 6: head.
struct Tree {
  torch::Tensor first = torch::randn({3, 3}), second = torch::randn({3, 3}), head = torch::randn({2, 3});
  ModuleProfile profile{{{.name = "", .class_name = "Model", .settings = "", .num_parameters = 24},
                         {.name = "body", .class_name = "Body", .settings = "", .parent = 0, .num_parameters = 18},
                         {.name = "first",
                          .class_name = "Linear",
                          .settings = "bias=false",
                          .parent = 1,
                          .parameters = {first.unsafeGetTensorImpl()},
                          .num_parameters = 9},
                         {.name = "act", .class_name = "ReLU", .settings = "", .parent = 1},
                         {.name = "second",
                          .class_name = "Linear",
                          .settings = "",
                          .parent = 1,
                          .parameters = {second.unsafeGetTensorImpl()},
                          .num_parameters = 9},
                         {.name = "last", .class_name = "ReLU", .settings = "", .parent = 1},
                         {.name = "head",
                          .class_name = "Linear",
                          .settings = "",
                          .parent = 0,
                          .parameters = {head.unsafeGetTensorImpl()},
                          .num_parameters = 6}},
                        at::kCPU};
  void run() {
    profile.start();
    const auto x = torch::ones({2, 3});
    auto y = torch::linear(x.mul(2), first).relu();  // before the first parameter: the root's
    y = torch::linear(y.add(y), second);             // an add of the body's own
    y = torch::relu(y);                              // of the second one
    y = torch::matmul(y, head.t());                  // by a view
    torch::softmax(y, -1);                           // after the last parameter
    profile.stop();
  }
};

TEST(ModuleProfile, OperatorsBelongToTheModuleWhoseParametersTheyHaveOrLieBetween) {
  Tree tree;
  tree.run();
  std::vector<int64_t> flops, macs;
  for (const auto& cost : tree.profile.costs()) flops.push_back(cost.flops), macs.push_back(cost.macs);
  //                                       root                body            first act second last head
  EXPECT_THAT(flops, testing::ElementsAre(6 + 90 + 24 + 4, 36 + 6 + 6 + 36 + 6, 36, 6, 36, 6, 24));
  EXPECT_THAT(macs, testing::ElementsAre(18 + 18 + 12, 18 + 18, 18, 0, 18, 0, 12));
}

TEST(ModuleProfile, IsPrintedAsDeepSpeedsIs) {
  Tree tree;
  tree.run();
  const auto text = text_of(tree.profile, {.step = 3,
                                           .ranks = 2,
                                           .batch_size = 2,
                                           .samples = 4,
                                           .recompute_fwd_factor = 1,
                                           .module_depth = 1,
                                           .top_modules = 2});
  EXPECT_THAT(text, HasSubstr("Profile Summary at step 3:\n"));
  const auto line = [](const std::string& what, const std::string& value) {
    return what + ": " + std::string(70 - what.size() - 2, ' ') + "  " + value +
           std::string(8 - std::min<size_t>(8, value.size()), ' ') + "\n";
  };
  EXPECT_THAT(text, HasSubstr(line("world size", "2")));
  EXPECT_THAT(text, HasSubstr(line("batch size per GPU", "2")));
  EXPECT_THAT(text, HasSubstr(line("params per GPU", "24")));
  EXPECT_THAT(text, HasSubstr(line("fwd MACs per GPU", "48 MACs")));
  EXPECT_THAT(text, HasSubstr(line("fwd flops per GPU", "124 ")));
  EXPECT_THAT(text, HasSubstr("bwd FLOPS per GPU = 3 * fwd flops per GPU / bwd latency: "));
  EXPECT_THAT(text, HasSubstr("depth 1:\n    params      - {'Body': '18', 'Linear': '6'}\n"
                              "    MACs        - {'Body': '36 MACs', 'Linear': '12 MACs'}\n"));
  EXPECT_THAT(text, testing::Not(HasSubstr("depth 2:")));
  EXPECT_THAT(text, testing::ContainsRegex("    \\(first\\): Linear\\(9 = 37.5% Params, 18 MACs = 37.5% MACs, .*"
                                           "% latency, .*FLOPS, bias=false\\)"));
  EXPECT_THAT(text_of(tree.profile, {.detailed = false}), testing::Not(HasSubstr("(first)")));
}

/// A table that is tied to a layer counts where it is used.
TEST(ModuleProfile, TiedWeightsCountWhereTheyAreUsed) {
  const auto weight = torch::randn({4, 3});
  ModuleProfile profile({{.name = "", .class_name = "Model", .settings = ""},
                         {.name = "table",
                          .class_name = "Embedding",
                          .settings = "",
                          .parent = 0,
                          .parameters = {weight.unsafeGetTensorImpl()}},
                         {.name = "head",
                          .class_name = "Linear",
                          .settings = "",
                          .parent = 0,
                          .parameters = {weight.unsafeGetTensorImpl()}}},
                        at::kCPU);
  profile.start();
  torch::linear(torch::embedding(weight, torch::arange(2)), weight);
  profile.stop();
  EXPECT_EQ(profile.costs()[1].macs, 0);
  EXPECT_EQ(profile.costs()[2].macs, 2 * 3 * 4);
}

}  // namespace
