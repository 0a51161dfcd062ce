/// Modules built without memory and materialised are, bit for bit, the modules that eager construction makes. Both
/// sides run the same expression.

#include <array>
#include <optional>

#include "deferred_support.hpp"

namespace {

using namespace deferred_test;
namespace nn = torch::nn;
namespace init = torch::nn::init;

struct Case {
  std::string name;
  Build build;
};
void PrintTo(const Case& item, std::ostream* out) { *out << item.name; }

template <class Holder, class... Arguments> Build holder(Arguments... arguments) {
  return [=] { return Holder(arguments...).ptr(); };
}

/// A GPT as LibTorch's users write it: a second pass over all weights, residual projections scaled, tied head,
/// padding row, causal mask and positions as buffers.
struct HeadImpl : nn::Module {
  HeadImpl() : weight(register_parameter("weight", torch::empty({50, 16}))) { init::xavier_uniform_(weight); }
  void tie(const at::Tensor& other) { weight = parameters_["weight"] = other; }
  at::Tensor weight;
};
struct TinyGptImpl : nn::Module {
  TinyGptImpl() {
    tokens = register_module("tokens", nn::Embedding(nn::EmbeddingOptions(50, 16).padding_idx(3)));
    for (int64_t i = 0; i < 2; ++i)
      blocks->push_back(nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32)));
    register_module("blocks", blocks);
    head = register_module("head", std::make_shared<HeadImpl>());
    positions = register_parameter("positions", torch::randn({8, 16}) * 0.02);
    register_buffer("mask", torch::ones({8, 8}).tril().view({1, 1, 8, 8}));
    register_buffer("position_ids", torch::arange(8).expand({1, -1}));
    register_buffer("mean", torch::tensor({0.485, 0.456, 0.406}).view({3, 1}));
    register_buffer("scale", torch::tensor(2.5));
    apply([](nn::Module& module) {
      torch::NoGradGuard no_grad;
      if (auto* linear = module.as<nn::Linear>()) {
        linear->weight.normal_(0, 0.02);
        if (linear->bias.defined()) linear->bias.zero_();
      } else if (auto* embedding = module.as<nn::Embedding>()) {
        embedding->weight.data().normal_(0, 0.02);
        embedding->weight.data()[3].zero_();
      }
    });
    for (const auto& item : named_parameters())
      if (item.key().ends_with("linear2.weight")) item.value().data().mul_(0.5);
    head->tie(tokens->weight);
  }
  nn::Embedding tokens{nullptr};
  nn::ModuleList blocks;
  std::shared_ptr<HeadImpl> head;
  at::Tensor positions;
};

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"TinyGpt", [] { return std::make_shared<TinyGptImpl>(); }},
      {"Linear", holder<nn::Linear>(7, 5)},
      {"Bilinear", holder<nn::Bilinear>(3, 4, 5)},
      {"Conv2d", holder<nn::Conv2d>(nn::Conv2dOptions(4, 6, 3).groups(2))},
      {"ConvTranspose3d", holder<nn::ConvTranspose3d>(nn::ConvTranspose3dOptions(2, 4, 3))},
      {"BatchNorm2d", holder<nn::BatchNorm2d>(6)},
      {"InstanceNorm", holder<nn::InstanceNorm1d>(nn::InstanceNorm1dOptions(6).affine(true).track_running_stats(true))},
      {"LayerNorm", holder<nn::LayerNorm>(nn::LayerNormOptions({4, 5}))},
      {"GroupNorm", holder<nn::GroupNorm>(2, 6)},
      {"PReLU", holder<nn::PReLU>()},
      {"Embedding", holder<nn::Embedding>(11, 6)},
      {"EmbeddingPadding", holder<nn::Embedding>(nn::EmbeddingOptions(11, 6).padding_idx(2))},
      {"EmbeddingBag", holder<nn::EmbeddingBag>(11, 6)},
      {"RNN", holder<nn::RNN>(nn::RNNOptions(4, 6).num_layers(2))},
      {"LSTM", holder<nn::LSTM>(nn::LSTMOptions(4, 6).num_layers(2).bidirectional(true))},
      {"LSTMProjected", holder<nn::LSTM>(nn::LSTMOptions(4, 6).proj_size(3))},
      {"GRUCell", holder<nn::GRUCell>(4, 6)},
      {"MultiheadAttention", holder<nn::MultiheadAttention>(8, 2)},
      {"MultiheadAttentionKdim", holder<nn::MultiheadAttention>(nn::MultiheadAttentionOptions(8, 2).kdim(6).vdim(5).add_bias_kv(true))},
      {"Transformer", holder<nn::Transformer>(nn::TransformerOptions(8, 2).num_encoder_layers(1).num_decoder_layers(1).dim_feedforward(16))},
      {"AdaptiveLogSoftmax", holder<nn::AdaptiveLogSoftmaxWithLoss>(nn::AdaptiveLogSoftmaxWithLossOptions(32, 20, {5, 10}))},
      {"Sequential", [] { return nn::Sequential(nn::Linear(4, 8), nn::BatchNorm1d(8), nn::Dropout(0.1), nn::Linear(8, 2)).ptr(); }},
      {"ParameterList",
       [] {
         nn::ParameterList list;
         for (int i = 1; i < 4; ++i) list->append(torch::randn({i, 3}).requires_grad_());
         return list.ptr();
       }},
      {"ParameterDict",
       [] {
         nn::ParameterDict dict;
         dict->insert("a", torch::rand({2, 3}));
         dict->insert("b", torch::zeros({4}).requires_grad_());
         return dict.ptr();
       }},
      {"Double",
       [] {
         torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
         nn::ParameterList module;
         module->append(torch::randn({3}).requires_grad_());
         module->append(torch::full({2}, 0.1).requires_grad_());
         module->register_module("linear", nn::Linear(3, 4));
         torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
         return module.ptr();
       }},
      {"ToHalf",
       [] {
         Module module = nn::Linear(3, 4).ptr();
         module->to(torch::kBFloat16);
         return module;
       }},
      {"Clone",
       [] {
         nn::Sequential two(nn::Linear(3, 4), nn::BatchNorm1d(4));
         two->push_back(std::dynamic_pointer_cast<nn::LinearImpl>(two->ptr(0)->clone()));
         return two.ptr();
       }},
  };
  const std::vector<std::pair<std::string, std::function<void(at::Tensor)>>> initialisers = {
      {"normal", [](at::Tensor w) { init::normal_(w, 1, 2); }},
      {"uniform", [](at::Tensor w) { init::uniform_(w, -1, 2); }},
      {"constant", [](at::Tensor w) { init::constant_(w, 0.3); }},
      {"eye", [](at::Tensor w) { init::eye_(w); }},
      {"orthogonal", [](at::Tensor w) { init::orthogonal_(w, 1.5); }},
      {"sparse", [](at::Tensor w) { init::sparse_(w, 0.4); }},
      {"kaiming_normal", [](at::Tensor w) { init::kaiming_normal_(w); }},
      {"kaiming_uniform", [](at::Tensor w) { init::kaiming_uniform_(w, 0.2); }},
      {"xavier_normal", [](at::Tensor w) { init::xavier_normal_(w); }},
      {"xavier_uniform", [](at::Tensor w) { init::xavier_uniform_(w); }},
      {"trunc_normal",
       [](at::Tensor w) {
         torch::NoGradGuard no_grad;
         w.uniform_(-0.9, 0.9).erfinv_().mul_(0.02 * std::sqrt(2.0)).add_(0.1).clamp_(-2, 2);
       }},
      {"redrawn",
       [](at::Tensor w) {
         init::normal_(w);
         init::uniform_(w);
       }},
      {"scaled",
       [](at::Tensor w) {
         init::normal_(w);
         w.data().mul_(0.02);
       }},
      {"cauchy", [](at::Tensor w) { w.data().cauchy_(); }},
      {"exponential", [](at::Tensor w) { w.data().exponential_(); }},
      {"log_normal", [](at::Tensor w) { w.data().log_normal_(); }},
      {"geometric", [](at::Tensor w) { w.data().geometric_(0.3); }},
      {"bernoulli", [](at::Tensor w) { w.data().bernoulli_(0.3); }},
      {"bernoulli_of_a_tensor", [](at::Tensor w) { w.data().bernoulli_(torch::rand_like(w.data())); }},
      {"random", [](at::Tensor w) { w.data().random_(0, 9); }},
      {"rows",
       [](at::Tensor w) {
         for (int64_t i = 0; i < w.size(0); ++i) w.data()[i].normal_(static_cast<double>(i), 0.1);
       }},
      {"narrowed",
       [](at::Tensor w) {
         torch::NoGradGuard no_grad;
         init::normal_(w);
         w.narrow(1, 2, 3).zero_();
         w.t().select(0, 1).fill_(7);
       }},
      {"by_index",
       [](at::Tensor w) {
         torch::NoGradGuard no_grad;
         init::zeros_(w);
         w.index_put_({torch::tensor({0, 2}), torch::tensor({1, 1})}, torch::randn({2}));
       }},
      {"permuted", [](at::Tensor w) { w.data().copy_(torch::randperm(w.numel()).view_as(w)); }},
      {"multinomial",
       [](at::Tensor w) { w.data().copy_(torch::multinomial(torch::rand({w.numel()}), w.numel()).view_as(w)); }},
      {"dropped",
       [](at::Tensor w) {
         init::ones_(w);
         w.data().copy_(torch::dropout(w.data(), 0.5, true));
       }},
      {"lists",
       [](at::Tensor w) {
         w.data().copy_(torch::cat({torch::randn({w.size(0), 1}), torch::zeros({w.size(0), w.size(1) - 1})}, 1));
       }},
      {"conjugate",
       [](at::Tensor w) {
         w.data().copy_(
             torch::real(torch::conj(torch::randn(w.sizes(), torch::kComplexFloat)) * c10::complex<float>(0, 1)));
       }},
      {"svd",
       [](at::Tensor w) {
         w.data().copy_(std::get<0>(torch::linalg_svd(torch::randn_like(w.data()), false))
                            .matmul(torch::ones({w.size(1), w.size(1)}).triu()));
       }},
      {"reseeded",
       [](at::Tensor w) {
         torch::manual_seed(99);
         init::normal_(w);
       }},
      {"own_generator",
       [](at::Tensor w) {
         auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
         w.data().normal_(0, 1, generator);
         w.data().add_(torch::randn(w.sizes(), generator));
       }},
  };
  for (const auto& [name, initialise] : initialisers) {
    all.push_back({"init_" + name, custom([initialise = initialise](Custom& module) {
                     module.parameter("first", torch::randn({3}));
                     initialise(module.parameter("weight", torch::empty({8, 6})));
                     module.parameter("after", torch::rand({17}));
                     module.buffer("noise", torch::randn({2, 2}));
                   })});
  }
  all.push_back({"conv_dirac_channels_last", custom([](Custom& module) {
                   init::dirac_(
                       module.parameter("weight", torch::empty({4, 4, 3, 3}, torch::TensorOptions().memory_format(
                                                                                 torch::MemoryFormat::ChannelsLast))));
                   module.parameter("strided", torch::randn({3, 4}).t());
                   module.parameter("offset", torch::randn({6, 4}).narrow(0, 2, 3));
                 })});
  all.push_back({"combined", custom([](Custom& module) {
                   auto a = module.parameter("a", torch::randn({4, 4}));
                   auto b = module.parameter("b", torch::empty({4, 4}));
                   torch::NoGradGuard no_grad;
                   b.copy_(a);
                   a.mul_(3);
                   auto shared = torch::randn({4, 4});
                   module.parameter("c", shared * 2);
                   module.parameter("d", shared + b);
                   b.zero_();
                   module.parameter("frozen", torch::rand({5}), false);
                   module.buffer("of_a", a.detach().sum(0));
                   module.buffer("frequencies",
                                 1.0 / torch::pow(10000.0, torch::arange(0, 8, 2).to(torch::kFloat) / 8));
                   module.buffer("grid", torch::stack(torch::meshgrid(
                                             {torch::arange(3), torch::linspace(0, 1, 3).to(torch::kLong)}, "ij")));
                   module.buffer("counter", torch::tensor(std::vector<int64_t>{1, 2, 3}));
                   module.buffer("full", torch::full({3}, 4));
                   module.buffer("eye", torch::eye(4).to(torch::kBool));
                   module.buffer("nothing", torch::empty({0}));
                 })});
  all.push_back({"values_in_the_constructor", custom([](Custom& module) {
                   auto a = module.parameter("a", torch::randn({64}));
                   module.parameter("b", torch::rand({3}) + a.detach().sum().item<float>());
                   auto mask = a.detach() > 0;
                   module.parameter("positive", a.detach().masked_select(mask));
                   module.parameter("sized", torch::randn({mask.sum().item<int64_t>()}));
                   if (torch::equal(mask, mask.clone())) module.parameter("c", torch::randn({3}));
                   auto values = torch::tensor({1.0F, 2.0F, 3.0F});
                   values.normal_();
                   module.buffer("drawn_at_once", values);
                   values.add_(torch::rand({3}));
                   module.parameter("last", torch::randn({3}) * values);
                 })});
  return all;
}

class EveryModule : public testing::TestWithParam<Case> {};

TEST_P(EveryModule, IsTheSameAsEager) {
  torch::manual_seed(kSeed);
  const Module eager = GetParam().build();
  const at::Tensor next = torch::rand({5});

  torch::manual_seed(kSeed);
  const Module module = build_deferred(GetParam().build);
  bool any = false;
  for (const auto& item : ModelRef(module).parameters()) {
    if (item.first == "frozen" || !is_deferred(item.second)) continue;
    any = true;
    EXPECT_TRUE(item.second.is_meta());
    EXPECT_TRUE(item.second.requires_grad()) << item.first;
  }
  EXPECT_TRUE(any);
  for (const auto& [name, buffer] : ModelRef(module).buffers())
    EXPECT_FALSE(is_deferred(buffer) || buffer.is_meta()) << name;
  std::vector<const at::TensorImpl*> before, after;
  for (const auto& item : ModelRef(module).state()) before.push_back(item.second.unsafeGetTensorImpl());
  materialize(module);
  for (const auto& item : ModelRef(module).state()) after.push_back(item.second.unsafeGetTensorImpl());
  EXPECT_EQ(before, after) << "tensors keep their identity";
  expect_same(eager, module);
  EXPECT_TRUE(torch::equal(torch::rand({5}), next)) << "the generator stands where eager construction leaves it";
  materialize(module);
  expect_same(eager, module);
}

TEST_P(EveryModule, IsTheSameWithBuffersIncludedAndDrawsInBetween) {
  torch::manual_seed(kSeed);
  const Module eager = GetParam().build();
  torch::manual_seed(kSeed);
  const Module module = build_deferred(GetParam().build, /*include_buffers=*/true);
  torch::rand({3});
  const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
  materialize(module);
  expect_same(eager, module);
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state))
      << "whoever has drawn meanwhile goes on";
}

TEST_P(EveryModule, IsTheSameInParts) {
  torch::manual_seed(kSeed);
  const Module eager = nn::Sequential(nn::Linear(3, 3), nn::Linear(4, 4)).ptr();
  const Module middle = GetParam().build();
  const Module last = nn::LSTM(3, 3).ptr();
  const at::Tensor next = torch::rand({5});
  // Every order of three parts.
  std::array<int, 3> order{0, 1, 2};
  do {
    torch::manual_seed(kSeed);
    std::vector<Module> parts;
    {
      auto scope = init_empty_weights();
      parts.push_back(nn::Sequential(nn::Linear(3, 3), nn::Linear(4, 4)).ptr());
      parts.push_back(GetParam().build());
      parts.push_back(nn::LSTM(3, 3).ptr());
    }
    for (const int part : order) materialize(parts[static_cast<size_t>(part)]);
    expect_same(eager, parts[0]);
    expect_same(middle, parts[1]);
    expect_same(last, parts[2]);
    EXPECT_TRUE(torch::equal(torch::rand({5}), next));
  } while (std::next_permutation(order.begin(), order.end()));
}

INSTANTIATE_TEST_SUITE_P(Deferred, EveryModule, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
