/// Kernels that work out sizes: each against the CPU's own, which has the last word on sizes, strides and dtypes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "residency/meta_kernels.hpp"

namespace {

using at::Tensor;
namespace F = torch::nn::functional;

using Tensors = std::vector<Tensor>;
using Function = std::function<Tensors(const Tensors&)>;

struct Case {
  std::string name;
  Function run;
  Tensors inputs;
};

std::string text_of(const Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return c10::str(tensor.sizes(), " strides ", tensor.strides(), " ", tensor.scalar_type());
}

/// On the meta device as on the CPU, forward and, if asked for, backward.
void expect_equal(const Case& c, bool backward = false) {
  SCOPED_TRACE(c.name);
  accelerate::meta_memory::install_kernels();
  Tensors meta, real;
  for (const Tensor& input : c.inputs) {
    real.push_back(input.detach().clone(at::MemoryFormat::Preserve));
    meta.push_back(at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta)));
    if (backward && input.is_floating_point()) real.back().requires_grad_(true), meta.back().requires_grad_(true);
  }
  try {
    const auto expected = c.run(real), found = c.run(meta);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) EXPECT_EQ(text_of(found[i]), text_of(expected[i])) << "result " << i;
    if (!backward) return;
    const auto sum = [](const Tensors& results) { return results[0].sum(); };
    sum(expected).backward();
    sum(found).backward();
    for (size_t i = 0; i < meta.size(); ++i) {
      if (!real[i].requires_grad()) continue;
      ASSERT_EQ(found.empty(), false);
      ASSERT_EQ(meta[i].grad().defined(), real[i].grad().defined()) << "gradient " << i;
      if (real[i].grad().defined()) {
        EXPECT_EQ(meta[i].grad().sizes(), real[i].grad().sizes()) << "gradient " << i;
      }
    }
  } catch (const c10::Error& error) {
    ADD_FAILURE() << error.what_without_backtrace();
  }
}

Function one(const std::function<Tensor(const Tensor&)>& f) {
  return [f](const Tensors& t) { return Tensors{f(t[0])}; };
}
Function two(const std::function<Tensor(const Tensor&, const Tensor&)>& f) {
  return [f](const Tensors& t) { return Tensors{f(t[0], t[1])}; };
}
template <class Tuple> Tensors list(const Tuple& tuple) {
  return std::apply([](const auto&... items) { return Tensors{items...}; }, tuple);
}

const auto kImage = torch::randn({2, 4, 9, 8});
const auto kRows = torch::randn({3, 5, 8});

TEST(MetaKernels, WhatTheCpuGivesWithoutGradients) {
  const torch::NoGradGuard no_grad;
  const auto last = kImage.contiguous(at::MemoryFormat::ChannelsLast);
  const auto weight = torch::randn({6, 2, 3, 3}), bias = torch::randn({6}), four = torch::rand({4}) + 0.5;
  const auto ids = torch::randint(0, 5, {3, 4});
  const auto mask = kRows > 0;
  const std::vector<Case> cases{
      {"convolution 2d",
       two([](auto& x, auto& w) { return torch::conv2d(x, w, Tensor(), 2, 1, 1, 2); }),
       {kImage, weight}},
      {"convolution 2d, channels last",
       two([](auto& x, auto& w) { return torch::conv2d(x, w, Tensor(), 1, 2, 2, 2); }),
       {last, weight}},
      {"convolution 2d, without a batch",
       two([](auto& x, auto& w) {
         return torch::conv2d(x, w, Tensor(), at::IntArrayRef{1}, at::IntArrayRef{0}, at::IntArrayRef{1}, 2);
       }),
       {kImage[0], weight}},
      {"convolution 1d",
       two([](auto& x, auto& w) { return torch::conv1d(x, w, Tensor(), 3, 2); }),
       {torch::randn({2, 4, 20}), torch::randn({6, 4, 5})}},
      {"convolution 3d",
       two([](auto& x, auto& w) { return torch::conv3d(x, w); }),
       {torch::randn({1, 2, 5, 6, 7}), torch::randn({3, 2, 2, 3, 4})}},
      {"convolution, same padding",
       two([](auto& x, auto& w) {
         return torch::conv2d(x, w, Tensor(), at::IntArrayRef{1}, "same", at::IntArrayRef{1}, 2);
       }),
       {kImage, weight}},
      {"transposed convolution",
       two([](auto& x, auto& w) { return torch::conv_transpose2d(x, w, Tensor(), 2, 1, 1, 2); }),
       {kImage, torch::randn({4, 3, 3, 3})}},
      {"batch norm",
       [](const Tensors& t) { return list(torch::native_batch_norm(t[0], t[1], t[1], t[1], t[1], false, 0.1, 1e-5)); },
       {kImage, four}},
      {"batch norm in training",
       [](const Tensors& t) { return list(torch::native_batch_norm(t[0], t[1], t[1], {}, {}, true, 0.1, 1e-5)); },
       {last, four}},
      {"batch norm, whole",
       [](const Tensors& t) {
         return Tensors{torch::batch_norm(t[0], t[1], t[1], t[1], t[1], false, 0.1, 1e-5, true)};
       },
       {kImage, four}},
      {"batch norm of rows",
       [](const Tensors& t) {
         return Tensors{torch::batch_norm(t[0], t[1], t[1], t[1], t[1], false, 0.1, 1e-5, true)};
       },
       {torch::randn({7, 4}), four}},
      {"instance norm",
       [](const Tensors& t) { return Tensors{torch::instance_norm(t[0], t[1], t[1], {}, {}, true, 0.1, 1e-5, true)}; },
       {kImage, four}},
      {"group norm",
       [](const Tensors& t) { return list(torch::native_group_norm(t[0], t[1], t[1], 2, 4, 72, 2, 1e-5)); },
       {kImage, four}},
      {"group norm, whole",
       [](const Tensors& t) { return Tensors{torch::group_norm(t[0], 2, t[1], t[1])}; },
       {kImage, four}},
      {"layer norm",
       [](const Tensors& t) { return list(torch::native_layer_norm(t[0], {8}, t[1], t[1], 1e-5)); },
       {kRows, torch::randn({8})}},
      {"layer norm in 16 bits",
       [](const Tensors& t) { return list(torch::native_layer_norm(t[0], {8}, t[1], t[1], 1e-5)); },
       {kRows.to(at::kBFloat16), torch::randn({8}).to(at::kBFloat16)}},
      {"layer norm of a view", one([](auto& x) { return torch::layer_norm(x.transpose(0, 1), {8}); }), {kRows}},
      {"rms norm", two([](auto& x, auto& w) { return torch::rms_norm(x, {8}, w); }), {kRows, torch::randn({8})}},
      {"max pool 2d", one([](auto& x) { return torch::max_pool2d(x, 3, 2, 1); }), {kImage}},
      {"max pool 2d, channels last, up", one([](auto& x) { return torch::max_pool2d(x, 2, 2, 0, 1, true); }), {last}},
      {"max pool 1d", one([](auto& x) { return torch::max_pool1d(x, 3, 2); }), {kRows}},
      {"average pool 2d", one([](auto& x) { return torch::avg_pool2d(x, 2); }), {kImage}},
      {"adaptive average pool to 1",
       one([](auto& x) {
         return torch::adaptive_avg_pool2d(x, {1, 1});
       }),
       {kImage}},
      {"adaptive average pool to 1, channels last",
       one([](auto& x) {
         return torch::adaptive_avg_pool2d(x, {1, 1});
       }),
       {last}},
      {"adaptive average pool",
       one([](auto& x) {
         return torch::adaptive_avg_pool2d(x, {3, 5});
       }),
       {kImage}},
      {"adaptive average pool, channels last",
       one([](auto& x) {
         return torch::adaptive_avg_pool2d(x, {3, 5});
       }),
       {last}},
      {"adaptive average pool 1d", one([](auto& x) { return torch::adaptive_avg_pool1d(x, 3); }), {kRows}},
      {"adaptive average pool 3d",
       one([](auto& x) {
         return torch::adaptive_avg_pool3d(x, {2, 2, 2});
       }),
       {torch::randn({1, 2, 5, 6, 7})}},
      {"adaptive max pool",
       one([](auto& x) {
         return std::get<0>(torch::adaptive_max_pool2d(x, {3, 5}));
       }),
       {kImage}},
      {"unfold and fold",
       one([](auto& x) {
         return F::fold(F::unfold(x, F::UnfoldFuncOptions({3, 2}).padding(1).stride(2)),
                        F::FoldFuncOptions({9, 8}, {3, 2}).padding(1).stride(2));
       }),
       {kImage}},
      {"unfold",
       one([](auto& x) {
         return F::unfold(x, F::UnfoldFuncOptions({3, 2}));
       }),
       {kImage}},
      {"grid sampler",
       two([](auto& x, auto& g) { return torch::grid_sampler(x, g, 0, 0, false); }),
       {kImage, torch::randn({2, 5, 6, 2})}},
      {"reflection pad",
       one([](auto& x) {
         return torch::reflection_pad2d(x, {1, 2, 3, 4});
       }),
       {kImage}},
      {"replication pad",
       one([](auto& x) {
         return torch::replication_pad2d(x, {1, 2, 3, 4});
       }),
       {kImage}},
      {"constant pad",
       one([](auto& x) {
         return torch::constant_pad_nd(x, {1, 2});
       }),
       {kImage}},
      {"pixel shuffle", one([](auto& x) { return torch::pixel_shuffle(x, 2); }), {kImage}},
      {"interpolate",
       one([](auto& x) {
         return torch::upsample_bilinear2d(x, {12, 13}, false);
       }),
       {kImage}},
      {"softmax", one([](auto& x) { return torch::softmax(x, -1); }), {kRows}},
      {"softmax of a view, in fp32",
       one([](auto& x) { return torch::softmax(x.transpose(1, 2), 1, at::kFloat); }),
       {kRows.to(at::kBFloat16)}},
      {"log softmax", one([](auto& x) { return torch::log_softmax(x, 1); }), {kRows}},
      {"embedding", two([](auto& w, auto& i) { return torch::embedding(w, i); }), {torch::randn({5, 7}), ids}},
      {"embedding bag",
       two([](auto& w, auto& i) { return std::get<0>(torch::embedding_bag(w, i.flatten(), i.new_zeros({4}))); }),
       {torch::randn({5, 7}), ids}},
      {"index select", two([](auto& x, auto& i) { return torch::index_select(x, 1, i[0]); }), {kRows, ids}},
      {"index",
       two([](auto& x, auto& i) {
         return x.index({torch::indexing::Slice(), i[0]});
       }),
       {kRows, ids}},
      {"index put",
       two([](auto& x, auto& i) { return x.index_put({i[0].clamp_max(2)}, x.new_zeros({})); }),
       {kRows, ids}},
      {"index copy",
       two([](auto& x, auto& i) { return x.index_copy(0, i[0].narrow(0, 0, 1), x.narrow(0, 0, 1)); }),
       {kRows, ids}},
      {"index fill", two([](auto& x, auto& i) { return x.index_fill(1, i[0], 1.5); }), {kRows, ids}},
      {"gather", two([](auto& x, auto& i) { return x.gather(0, (i % 3).unsqueeze(-1)); }), {kRows, ids}},
      {"where", two([](auto& m, auto& x) { return torch::where(m, x, x.sum(0)); }), {mask, kRows}},
      {"where with a number", two([](auto& m, auto& x) { return torch::where(m, x, 1.0); }), {mask, kRows}},
      {"where of two dtypes",
       two([](auto& m, auto& x) { return torch::where(m, x, x.to(at::kDouble)); }),
       {mask, kRows}},
      {"masked fill", two([](auto& m, auto& x) { return x.masked_fill(m, -1); }), {mask, kRows}},
      {"take", two([](auto& x, auto& i) { return x.take(i); }), {kRows, ids}},
      {"flip",
       one([](auto& x) {
         return x.flip({0, 2});
       }),
       {kRows}},
      {"flip of a view", one([](auto& x) { return x.transpose(0, 2).flip({0}); }), {kRows}},
      {"roll",
       one([](auto& x) {
         return x.roll({1, 2}, {0, 2});
       }),
       {kRows}},
      {"roll of a view", one([](auto& x) { return x.transpose(0, 2).roll({1}, {0}); }), {kRows}},
      {"bucketize",
       two([](auto& x, auto& b) { return torch::bucketize(x, b); }),
       {kRows, torch::arange(4).to(at::kFloat)}},
      {"var", one([](auto& x) { return x.var(1, true, true); }), {kRows}},
      {"var of all", one([](auto& x) { return x.var(); }), {kRows}},
      {"std", one([](auto& x) { return x.std(-1); }), {kRows}},
      {"var_mean",
       [](const Tensors& t) {
         return list(torch::var_mean(t[0], at::IntArrayRef{0, 2}, at::Scalar(0), true));
       },
       {kRows}},
      {"mean",
       one([](auto& x) {
         return x.mean({1, 2});
       }),
       {kRows}},
      {"count_nonzero", one([](auto& x) { return torch::count_nonzero(x, at::IntArrayRef{1}); }), {kRows}},
      {"norm", one([](auto& x) { return x.norm(2, 1); }), {kRows}},
      {"median", [](const Tensors& t) { return list(t[0].median(1)); }, {kRows}},
      {"kthvalue", [](const Tensors& t) { return list(t[0].kthvalue(2, 1, true)); }, {kRows}},
      {"sort", [](const Tensors& t) { return list(t[0].sort(1)); }, {kRows}},
      {"topk", [](const Tensors& t) { return list(t[0].topk(2)); }, {kRows}},
      {"argmax", one([](auto& x) { return x.argmax(1); }), {kRows}},
      {"cumsum", one([](auto& x) { return x.cumsum(1); }), {kRows}},
      {"dot", one([](auto& x) { return x.flatten().dot(x.flatten()); }), {kRows}},
      {"max and min of all",
       [](const Tensors& t) {
         return Tensors{t[0].max(), t[0].min(), t[0].prod(), (t[0] > 0).prod()};
       },
       {kRows}},
      {"floor_divide", one([](auto& x) { return x.floor_divide(x[0]) + x.floor_divide(2); }), {kRows}},
      {"addbmm",
       one([](auto& x) {
         return torch::addbmm(x[0].new_zeros({5, 5}), x, x.transpose(1, 2));
       }),
       {kRows}},
      {"trace", one([](auto& x) { return x[0].trace(); }), {kRows}},
      {"cdist", two([](auto& a, auto& b) { return torch::cdist(a, b); }), {kRows, torch::randn({3, 4, 8})}},
      {"relu", one([](auto& x) { return torch::relu(x.transpose(0, 1)); }), {kRows}},
      {"gelu", one([](auto& x) { return torch::gelu(x, "tanh"); }), {kRows}},
      {"silu", one([](auto& x) { return torch::silu(x); }), {kRows}},
      {"hardswish", one([](auto& x) { return torch::hardswish(torch::hardtanh(x)); }), {kRows}},
      {"prelu", two([](auto& x, auto& w) { return torch::prelu(x, w); }), {kImage, four}},
      {"log sigmoid", one([](auto& x) { return torch::log_sigmoid(x); }), {kRows}},
      {"glu", one([](auto& x) { return torch::glu(x, -1); }), {kRows}},
      {"abs", one([](auto& x) { return x.abs(); }), {kRows}},
      {"abs of complex numbers", one([](auto& x) { return torch::complex(x, x).abs(); }), {kRows}},
      {"polar", one([](auto& x) { return torch::view_as_real(torch::polar(x, x)); }), {kRows}},
      {"isnan", one([](auto& x) { return x.isnan().logical_or(x.isinf()).logical_not(); }), {kRows}},
      {"nan_to_num", one([](auto& x) { return x.nan_to_num(); }), {kRows}},
      {"logical and", one([](auto& x) { return torch::logical_and(x, x[0]); }), {kRows}},
      {"triu", one([](auto& x) { return x.triu(1); }), {kRows}},
      {"repeat",
       one([](auto& x) {
         return x.repeat({2, 1, 3});
       }),
       {kRows}},
      {"linear", two([](auto& x, auto& w) { return torch::linear(x, w); }), {kRows, torch::randn({6, 8})}},
      {"einsum",
       two([](auto& x, auto& w) {
         return torch::einsum("btd,od->bto", {x, w});
       }),
       {kRows, torch::randn({6, 8})}},
      {"baddbmm", one([](auto& x) { return torch::baddbmm(x.new_zeros({}), x, x.transpose(1, 2)); }), {kRows}},
      {"weight norm",
       two([](auto& v, auto& g) { return torch::_weight_norm(v, g, 0); }),
       {torch::randn({4, 5}), torch::randn({4, 1})}},
      {"multinomial", one([](auto& x) { return x.abs()[0].multinomial(2); }), {kRows}},
  };
  for (const Case& c : cases) expect_equal(c);
}

/// Attention's formula and its fused kernels lay out the result differently: sizes and dtype only.
TEST(MetaKernels, AttentionHasTheSizesOfTheCpus) {
  accelerate::meta_memory::install_kernels();
  const auto q = torch::randn({2, 3, 5, 8}), mask = torch::zeros({2, 1, 5, 5});
  for (const bool causal : {false, true})
    for (const bool masked : {false, true}) {
      if (causal && masked) continue;
      const auto attend = [&](const Tensor& x, const Tensor& m) {
        return at::scaled_dot_product_attention(x, x, x, masked ? std::optional(m) : std::nullopt, 0.0, causal);
      };
      const auto expected = attend(q, mask), found = attend(q.to(at::kMeta), mask.to(at::kMeta));
      EXPECT_EQ(found.sizes(), expected.sizes());
      EXPECT_EQ(found.scalar_type(), expected.scalar_type());
    }
}

TEST(MetaKernels, GradientsHaveTheSizesOfTheCpus) {
  const auto weight = torch::randn({6, 4, 3, 3}), four = torch::rand({4}) + 0.5;
  const auto target = torch::rand({3, 5, 8});
  const std::vector<Case> cases{
      {"convolution",
       [](const Tensors& t) { return Tensors{torch::conv2d(t[0], t[1], t[2], 2, 1)}; },
       {kImage, weight, torch::randn({6})}},
      {"transposed convolution",
       [](const Tensors& t) { return Tensors{torch::conv_transpose2d(t[0], t[1], Tensor(), 2)}; },
       {kImage, torch::randn({4, 3, 3, 3})}},
      {"batch norm",
       [](const Tensors& t) { return Tensors{torch::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, true)}; },
       {kImage, four, four}},
      {"group norm",
       [](const Tensors& t) { return Tensors{torch::group_norm(t[0], 2, t[1], t[2])}; },
       {kImage, four, four}},
      {"layer norm",
       [](const Tensors& t) { return Tensors{torch::layer_norm(t[0], {8}, t[1], t[2])}; },
       {kRows, torch::randn({8}), torch::randn({8})}},
      {"max pool", one([](auto& x) { return torch::max_pool2d(x, 2); }), {kImage}},
      {"adaptive average pool",
       one([](auto& x) {
         return torch::adaptive_avg_pool2d(x, {3, 5});
       }),
       {kImage}},
      {"dropout", one([](auto& x) { return torch::dropout(x, 0.5, true); }), {kRows}},
      {"activations",
       one([](auto& x) { return torch::mish(torch::hardswish(torch::hardtanh(torch::log_sigmoid(x)))); }),
       {kRows}},
      {"mean squares", two([](auto& x, auto& y) { return torch::mse_loss(x, y); }), {kRows, target}},
      {"huber", two([](auto& x, auto& y) { return torch::huber_loss(x, y); }), {kRows, target}},
      {"smooth l1", two([](auto& x, auto& y) { return torch::smooth_l1_loss(x, y); }), {kRows, target}},
      {"binary cross entropy",
       two([](auto& x, auto& y) { return torch::binary_cross_entropy(torch::sigmoid(x), y.detach()); }),
       {kRows, target}},
      {"unfold", one([](auto& x) { return x.unfold(1, 2, 1); }), {kRows}},
      {"std", one([](auto& x) { return x.std(1); }), {kRows}},
  };
  for (const Case& c : cases) expect_equal(c, /*backward=*/true);
}

TEST(MetaKernels, AConvolutionalNetTrainsWithoutMemory) {
  accelerate::meta_memory::install_kernels();
  const auto meta = at::TensorOptions(at::kMeta);
  const auto x = torch::empty({512, 3, 224, 224}, meta), w = torch::empty({64, 3, 7, 7}, meta).requires_grad_(),
             gain = torch::empty({64}, meta).requires_grad_();
  auto y = torch::conv2d(x, w, Tensor(), 2, 3);
  y = torch::max_pool2d(torch::relu(torch::batch_norm(y, gain, gain, torch::empty({64}, meta), torch::empty({64}, meta),
                                                      true, 0.1, 1e-5, true)),
                        3, 2, 1);
  EXPECT_EQ(y.sizes(), (std::vector<int64_t>{512, 64, 56, 56}));
  torch::adaptive_avg_pool2d(y, {1, 1}).sum().backward();
  EXPECT_EQ(w.grad().sizes(), w.sizes());
}

}  // namespace
