// This library's Lion, Lamb, Muon and DeepSpeedAdam against their formulas, written out in double precision.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <concepts>
#include <limits>
#include <sstream>
#include <string>

#include "accelerate/optim.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "optim/ivalue_access.hpp"
#include "optim/optimizer_state.hpp"

namespace {

using namespace accelerate;
using namespace accelerate::optim;
using support::message_of;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;
using torch::optim::OptimizerParamGroup;

class OwnOptimizers : public ::testing::Test {
 protected:
  void SetUp() override { GradientState::reset(); }
  void TearDown() override { GradientState::reset(), AcceleratorState::reset(true); }
};

at::Tensor parameter_of(at::IntArrayRef shape, at::ScalarType type = at::kDouble) {
  torch::manual_seed(11);
  return torch::randn(shape, at::kDouble).to(type).set_requires_grad(true);
}
void give_gradient(const at::Tensor& parameter, int64_t step) {
  torch::manual_seed(100 + step);
  parameter.mutable_grad() = torch::randn(parameter.sizes(), at::kDouble).to(parameter.scalar_type());
}
double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach().to(at::kDouble) - b.detach().to(at::kDouble)).abs().max().item<double>();
}
std::vector<double> numbers(const at::Tensor& tensor) {
  const auto flat = tensor.detach().to(at::kDouble).contiguous().view(-1);
  return {flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel()};
}
at::Tensor like(const std::vector<double>& values, const at::Tensor& other) {
  return torch::tensor(values, at::kDouble).view(other.sizes());
}

/// Steps `count` times, by the plain steps or the fused ones. @return the parameter
template <class Optimizer, class Options>
at::Tensor trained(const Options& options, at::ScalarType type, bool fused, int64_t count,
                   const std::function<void(const at::Tensor&, int64_t)>& gradient = give_gradient) {
  const auto parameter = parameter_of({5, 7}, type);
  const AcceleratedOptimizer optimizer(std::make_shared<Optimizer>(Tensors{parameter}, options), true, nullptr,
                                       {.fused = fused});
  for (int64_t step = 0; step < count; ++step) {
    gradient(parameter, step);
    optimizer.step();
    EXPECT_EQ(optimizer.step_was_fused(), fused);
  }
  return parameter.detach();
}

at::Tensor lion_by_formula(double lr, double beta1, double beta2, double decay, int64_t count) {
  const auto parameter = parameter_of({5, 7});
  auto p = numbers(parameter);
  std::vector<double> m(p.size());
  for (int64_t step = 0; step < count; ++step) {
    give_gradient(parameter, step);
    const auto g = numbers(parameter.grad());
    for (size_t i = 0; i < p.size(); ++i) {
      const double mean = beta1 * m[i] + (1 - beta1) * g[i];
      p[i] = p[i] * (1 - lr * decay) - (mean > 0 ? lr : mean < 0 ? -lr : 0);
      m[i] = beta2 * m[i] + (1 - beta2) * g[i];
    }
  }
  return like(p, parameter);
}

TEST_F(OwnOptimizers, LionIsItsFormula) {
  for (const bool fused : {false, true}) {
    EXPECT_LE(difference(trained<Lion>(LionOptions(), at::kDouble, fused, 8), lion_by_formula(1e-3, 0.9, 0.999, 0, 8)),
              1e-14)
        << "DeepSpeed's defaults";
    const auto options = LionOptions(0.02).betas({0.8, 0.95}).weight_decay(0.5);
    EXPECT_LE(difference(trained<Lion>(options, at::kDouble, fused, 8), lion_by_formula(0.02, 0.8, 0.95, 0.5, 8)),
              1e-13);
    EXPECT_LE(difference(trained<Lion>(options, at::kFloat, fused, 8), lion_by_formula(0.02, 0.8, 0.95, 0.5, 8)), 1e-6);
  }
}

TEST_F(OwnOptimizers, LionLeavesWhatHasNoDirection) {
  for (const bool fused : {false, true}) {
    const auto before = parameter_of({5, 7}, at::kFloat).detach().clone();
    const auto after = trained<Lion>(LionOptions(0.1), at::kFloat, fused, 3, [](const at::Tensor& parameter, int64_t) {
      parameter.mutable_grad() = torch::zeros_like(parameter);
      parameter.mutable_grad()[0][0] = std::numeric_limits<double>::quiet_NaN();
      parameter.mutable_grad()[0][1] = std::numeric_limits<double>::infinity();
    });
    EXPECT_TRUE(torch::equal(after.slice(0, 1), before.slice(0, 1)));
    EXPECT_TRUE(after[0][0].isnan().item<bool>()) << "what is no number does not hide";
    EXPECT_NEAR(after[0][1].item<double>(), before[0][1].item<double>() - 0.3, 1e-5);
  }
}

/// Plain steps compute in fp32 and round once, as fused ones do: bits are the same.
TEST_F(OwnOptimizers, SixteenBitsRoundOnceFusedOrNot) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto lion = LionOptions(0.0625).weight_decay(0.5);
    const auto plain = trained<Lion>(lion, type, false, 6);
    EXPECT_EQ(plain.scalar_type(), type);
    EXPECT_TRUE(torch::equal(plain, trained<Lion>(lion, type, true, 6)));
    for (const bool fp32_states : {false, true}) {
      const auto adam = DeepSpeedAdamOptions(0.0625).fp32_optimizer_states(fp32_states);
      const auto by_plain = trained<DeepSpeedAdam>(adam, type, false, 6);
      // The order of roundings within fp32 differs, and so may the last bit that is kept, in few elements.
      const auto differs = by_plain.ne(trained<DeepSpeedAdam>(adam, type, true, 6));
      EXPECT_LE(differs.sum().item<int64_t>(), 2) << c10::toString(type) << fp32_states;
    }
    EXPECT_FALSE(
        torch::equal(trained<DeepSpeedAdam>(DeepSpeedAdamOptions(0.0625).fp32_optimizer_states(false), type, true, 12),
                     trained<DeepSpeedAdam>(DeepSpeedAdamOptions(0.0625), type, true, 12)))
        << "states of 16 bits are other states";
  }
}

struct AdamFormula {
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, decay = 0;
  bool decoupled = true, correction = true;
};
at::Tensor adam_by_formula(const AdamFormula& f, int64_t count) {
  const auto parameter = parameter_of({5, 7});
  auto p = numbers(parameter);
  std::vector<double> m(p.size()), v(p.size());
  for (int64_t step = 1; step <= count; ++step) {
    give_gradient(parameter, step - 1);
    const auto gradient = numbers(parameter.grad());
    const double c1 = f.correction ? 1 - std::pow(f.beta1, step) : 1,
                 c2 = f.correction ? 1 - std::pow(f.beta2, step) : 1;
    for (size_t i = 0; i < p.size(); ++i) {
      const double g = gradient[i] + (f.decoupled ? 0 : f.decay * p[i]);
      m[i] = f.beta1 * m[i] + (1 - f.beta1) * g;
      v[i] = f.beta2 * v[i] + (1 - f.beta2) * g * g;
      if (f.decoupled) p[i] -= f.lr * f.decay * p[i];
      p[i] -= f.lr * (m[i] / c1) / (std::sqrt(v[i] / c2) + f.eps);
    }
  }
  return like(p, parameter);
}

TEST_F(OwnOptimizers, DeepSpeedAdamIsItsFormula) {
  for (const bool fused : {false, true}) {
    const auto expect = [&](const DeepSpeedAdamOptions& options, const AdamFormula& formula) {
      EXPECT_LE(difference(trained<DeepSpeedAdam>(options, at::kDouble, fused, 9), adam_by_formula(formula, 9)), 1e-12);
      EXPECT_LE(difference(trained<DeepSpeedAdam>(options, at::kFloat, fused, 9), adam_by_formula(formula, 9)), 3e-6);
    };
    expect(DeepSpeedAdamOptions(), {});
    expect(DeepSpeedAdamOptions(0.05).weight_decay(0.3).betas({0.7, 0.9}).eps(1e-3),
           {.lr = 0.05, .beta1 = 0.7, .beta2 = 0.9, .eps = 1e-3, .decay = 0.3});
    expect(DeepSpeedAdamOptions(0.05).weight_decay(0.3).adam_w_mode(false),
           {.lr = 0.05, .decay = 0.3, .decoupled = false});
    expect(DeepSpeedAdamOptions(0.05).bias_correction(false), {.lr = 0.05, .correction = false});
    expect(DeepSpeedAdamOptions(0.05).bias_correction(false).adam_w_mode(false).weight_decay(0.3),
           {.lr = 0.05, .decay = 0.3, .decoupled = false, .correction = false});
  }
}

TEST_F(OwnOptimizers, DeepSpeedAdamHasStatesAsExactAsAsked) {
  for (const bool fused : {false, true}) {
    for (const auto& [fp32, expected] : {std::pair(true, at::kFloat), std::pair(false, at::kBFloat16)}) {
      const auto parameter = parameter_of({4}, at::kBFloat16);
      const auto bare =
          std::make_shared<DeepSpeedAdam>(Tensors{parameter}, DeepSpeedAdamOptions().fp32_optimizer_states(fp32));
      const AcceleratedOptimizer optimizer(bare, true, nullptr, {.fused = fused});
      EXPECT_EQ(initial_state(*bare, bare->param_groups()[0], parameter).at("exp_avg").scalar_type(), expected);
      give_gradient(parameter, 0);
      optimizer.step();
      const auto state = optimizer.state_dict();
      const auto moment = [&] {
        return optimizer.state_dict()
            .toGenericDict()
            .at("state")
            .toGenericDict()
            .at(0)
            .toGenericDict()
            .at("exp_avg_sq")
            .toTensor();
      };
      EXPECT_EQ(moment().scalar_type(), expected);
      const auto before = moment().clone();
      optimizer.load_state_dict(state);
      EXPECT_EQ(moment().scalar_type(), expected) << "also where it was read";
      EXPECT_TRUE(torch::equal(moment(), before));
      give_gradient(parameter, 1);
      optimizer.step();
      EXPECT_EQ(optimizer.step_was_fused(), fused);
    }
  }
}

struct LambFormula {
  double lr = 1e-3, eps = 1e-8, decay = 0, most = 10, least = 0.01;
  bool inside = false, correction = true;
};
at::Tensor lamb_by_formula(const at::Tensor& parameter, const LambFormula& f, int64_t count, double* ratio = nullptr) {
  auto p = numbers(parameter);
  std::vector<double> m(p.size()), v(p.size()), u(p.size());
  for (int64_t step = 1; step <= count; ++step) {
    give_gradient(parameter, step - 1);
    const auto g = numbers(parameter.grad());
    double of_p = 0, of_u = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      m[i] = 0.9 * m[i] + 0.1 * g[i];
      v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
      u[i] = m[i] / (f.inside ? std::sqrt(v[i] + f.eps) : std::sqrt(v[i]) + f.eps) + f.decay * p[i];
      of_p += p[i] * p[i], of_u += u[i] * u[i];
    }
    const double found = of_p == 0 || of_u == 0 ? 1 : std::min(f.most, std::max(f.least, std::sqrt(of_p / of_u)));
    const double rate = f.correction ? f.lr * std::sqrt(1 - std::pow(0.999, step)) / (1 - std::pow(0.9, step)) : f.lr;
    for (size_t i = 0; i < p.size(); ++i) p[i] -= rate * found * u[i];
    if (ratio) *ratio = found;
  }
  return like(p, parameter);
}

TEST_F(OwnOptimizers, LambIsItsFormula) {
  const auto expect = [](const LambOptions& options, const LambFormula& formula, double scale, double expected_ratio) {
    for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 3e-6)}) {
      const auto parameter = (parameter_of({5, 7}).detach() * scale).to(type).set_requires_grad(true);
      double ratio = 0;
      const auto expected = lamb_by_formula(parameter, formula, 6, &ratio);
      Lamb lamb(Tensors{parameter}, options);
      for (int64_t step = 0; step < 6; ++step) {
        give_gradient(parameter, step);
        lamb.step();
      }
      EXPECT_LE(difference(parameter, expected), tolerance * std::max(1.0, scale));
      if (expected_ratio > 0) {
        EXPECT_EQ(ratio, expected_ratio);
      }
    }
  };
  expect(LambOptions(), {}, 1, -1);
  expect(LambOptions(0.05).weight_decay(0.3).eps(1e-2), {.lr = 0.05, .eps = 1e-2, .decay = 0.3}, 1, -1);
  expect(LambOptions(0.05).eps(1e-2).eps_inside_sqrt(true), {.lr = 0.05, .eps = 1e-2, .inside = true}, 1, -1);
  expect(LambOptions(0.05).bias_correction(false), {.lr = 0.05, .correction = false}, 1, -1);
  expect(LambOptions(), {}, 1000, 10);
  expect(LambOptions(), {}, 1e-4, 0.01);
  expect(LambOptions().max_coeff(2), {.most = 2}, 1000, 2);
  expect(LambOptions().min_coeff(0.5), {.least = 0.5}, 1e-4, 0.5);
  const auto zeros = torch::zeros({3}, torch::requires_grad());
  Lamb lamb(Tensors{zeros}, LambOptions(1e-2).bias_correction(false).eps(0));
  zeros.mutable_grad() = torch::ones({3});
  lamb.step();
  EXPECT_NEAR(zeros[0].item<double>(), -1e-2 * 0.1 / std::sqrt(0.001), 1e-6) << "a norm of zero has no ratio";
}

/// Five iterations, each on the matrix itself.
at::Tensor newton_schulz_by_formula(at::Tensor x) {
  const bool high = x.size(0) > x.size(1);
  if (high) x = x.t();
  x = x / (x.norm() + 1e-7);
  for (int i = 0; i < 5; ++i) {
    const auto a = x.mm(x.t());
    x = 3.4445 * x + (-4.775 * a + 2.0315 * a.mm(a)).mm(x);
  }
  return high ? x.t() : x;
}

struct MuonFormula {
  double lr = 0.02, decay = 0, momentum = 0.95;
};
/// @param as_matrix  what is made orthogonal of an update
at::Tensor muon_by_formula(const at::Tensor& parameter, const MuonFormula& f, int64_t count,
                           const std::function<at::Tensor(const at::Tensor&)>& orthogonal = newton_schulz_by_formula) {
  auto p = parameter.detach().to(at::kDouble).clone();
  auto m = torch::zeros_like(p);
  const double ratio = static_cast<double>(p.size(-2)) / static_cast<double>(p.size(-1));
  for (int64_t step = 0; step < count; ++step) {
    give_gradient(parameter, step);
    const auto g = parameter.grad().to(at::kDouble);
    m = f.momentum * m + (1 - f.momentum) * g;
    const auto ahead = (1 - f.momentum) * g + f.momentum * m;
    p = p * (1 - f.lr * f.decay) - f.lr * std::sqrt(std::max(1.0, ratio)) * orthogonal(ahead).view(p.sizes());
  }
  return p;
}

at::Tensor trained_by_muon(at::IntArrayRef shape, const MuonOptions& options, int64_t count = 4,
                           at::ScalarType type = at::kDouble) {
  const auto parameter = parameter_of(shape, type);
  Muon muon({OptimizerParamGroup(Tensors{parameter}, std::make_unique<MuonOptions>(options))});
  for (int64_t step = 0; step < count; ++step) {
    give_gradient(parameter, step);
    muon.step();
  }
  return parameter.detach();
}

TEST_F(OwnOptimizers, MuonIsItsFormulaOnMatricesOfAnyShape) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{6, 6}, {4, 9}, {9, 4}, {1, 5}, {5, 1}}) {
    EXPECT_LE(difference(trained_by_muon(shape, MuonOptions()), muon_by_formula(parameter_of(shape), {}, 4)), 1e-10);
    const auto options = MuonOptions().lr(0.1).weight_decay(0.2).momentum(0.8);
    EXPECT_LE(difference(trained_by_muon(shape, options),
                         muon_by_formula(parameter_of(shape), {.lr = 0.1, .decay = 0.2, .momentum = 0.8}, 4)),
              1e-10);
    EXPECT_LE(
        difference(trained_by_muon(shape, MuonOptions(), 4, at::kFloat), muon_by_formula(parameter_of(shape), {}, 4)),
        2e-4);
    // In bf16, which has 8 bits: other than the other way, and near it.
    const double low = difference(trained_by_muon(shape, MuonOptions().ns_method("standard")),
                                  muon_by_formula(parameter_of(shape), {}, 4));
    EXPECT_LE(low, 0.02);
    EXPECT_GE(low, 1e-7);
  }
  // A convolution's weight is a matrix of a row per channel; a stack of matrices is each by itself.
  EXPECT_LE(difference(trained_by_muon({4, 2, 3, 2}, MuonOptions()),
                       muon_by_formula(parameter_of({4, 2, 3, 2}), {}, 4,
                                       [](const at::Tensor& x) {
                                         return newton_schulz_by_formula(x.view({4, 12}));
                                       })),
            1e-10);
  EXPECT_LE(
      difference(trained_by_muon({3, 6, 4}, MuonOptions()),
                 muon_by_formula(parameter_of({3, 6, 4}), {}, 4,
                                 [](const at::Tensor& x) {
                                   return torch::stack({newton_schulz_by_formula(x[0]), newton_schulz_by_formula(x[1]),
                                                        newton_schulz_by_formula(x[2])});
                                 })),
      1e-10);
}

TEST_F(OwnOptimizers, MuonsUpdatesAreNearlyOrthogonal) {
  const auto parameter = torch::zeros({8, 20}, torch::requires_grad());
  Muon muon({OptimizerParamGroup(Tensors{parameter}, std::make_unique<MuonOptions>(MuonOptions().lr(1)))});
  give_gradient(parameter, 0);
  muon.step();
  const auto singular = std::get<1>(torch::linalg_svd(parameter.detach(), false, std::nullopt));
  EXPECT_GT(singular.min().item<double>(), 0.6);
  EXPECT_LT(singular.max().item<double>(), 1.3);
}

TEST_F(OwnOptimizers, MuonStepsByAdamOnTheRest) {
  for (const bool decoupled : {true, false}) {
    const auto bias = parameter_of({5, 7});
    const auto options = MuonOptions(false).lr(0.05).weight_decay(0.3).adam_w_mode(decoupled);
    Muon muon({OptimizerParamGroup(Tensors{bias}, std::make_unique<MuonOptions>(options))});
    for (int64_t step = 0; step < 6; ++step) {
      give_gradient(bias, step);
      muon.step();
    }
    const AdamFormula formula{.lr = 0.05, .beta2 = 0.95, .eps = 1e-10, .decay = 0.3, .decoupled = decoupled};
    EXPECT_LE(difference(bias, adam_by_formula(formula, 6)), 1e-12);
  }
  const auto bias = parameter_of({5, 7});
  Muon muon({OptimizerParamGroup(Tensors{bias},
                                 std::make_unique<MuonOptions>(MuonOptions(false).betas({0.7, 0.9}).eps(1e-2)))});
  for (int64_t step = 0; step < 3; ++step) give_gradient(bias, step), muon.step();
  EXPECT_LE(difference(bias, adam_by_formula({.lr = 3e-4, .beta1 = 0.7, .beta2 = 0.9, .eps = 1e-2}, 3)), 1e-12);
}

TEST_F(OwnOptimizers, MuonsGroupsAreMatricesAndTheRest) {
  const auto matrix = torch::zeros({2, 3}), vector = torch::zeros({3}), table = torch::zeros({4, 3}),
             head = torch::zeros({4, 3}), filter = torch::zeros({2, 3, 1, 1});
  const std::vector<std::pair<std::string, at::Tensor>> named{{"layer.weight", matrix},
                                                              {"layer.bias", vector},
                                                              {"Embedding.weight", table},
                                                              {"lm_head.weight", head},
                                                              {"conv.weight", filter}};
  const auto groups = muon_groups(named, MuonOptions().lr(0.5), MuonOptions(false).lr(0.25));
  ASSERT_EQ(groups.size(), 2U);
  const auto has = [&](const OptimizerParamGroup& group, const Tensors& expected, bool use_muon, double lr) {
    ASSERT_EQ(group.params().size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(group.params()[i].is_same(expected[i])) << i;
    EXPECT_EQ(static_cast<const MuonOptions&>(group.options()).use_muon(), use_muon);
    EXPECT_EQ(group.options().get_lr(), lr);
  };
  has(groups[0], {matrix, filter}, true, 0.5);
  has(groups[1], {vector, table, head}, false, 0.25);
  EXPECT_EQ(muon_groups({{"bias", vector}}).size(), 1U);
  EXPECT_EQ(muon_groups({{"bias", vector}})[0].options().get_lr(), 3e-4);
  EXPECT_EQ(muon_groups({{"weight", matrix}})[0].options().get_lr(), 0.02);
}

template <class Optimizer, class Options> void resumes(const Options& options, const std::vector<std::string>& fields) {
  const auto make = [&] {
    const auto parameter = parameter_of({4, 6}, at::kFloat);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(Tensors{parameter}, std::make_unique<Options>(options));
    return std::pair(parameter, AcceleratedOptimizer(std::make_shared<Optimizer>(groups)));
  };
  const auto [expected, whole] = make();
  for (int64_t step = 0; step < 3; ++step) give_gradient(expected, step), whole.step();
  const auto state = whole.state_dict();
  const auto entry = state.toGenericDict().at("state").toGenericDict().at(0).toGenericDict();
  std::vector<std::string> found;
  for (const auto& field : entry) found.push_back(field.key().toStringRef());
  EXPECT_THAT(found, testing::UnorderedElementsAreArray(fields));
  const auto [resumed, part] = make();
  resumed.set_data(expected.detach().clone());
  part.load_state_dict(state);
  for (int64_t step = 3; step < 6; ++step) {
    give_gradient(expected, step), whole.step();
    give_gradient(resumed, step), part.step();
  }
  EXPECT_TRUE(torch::equal(resumed, expected));
  // Bad ones change nothing.
  for (const auto& [key, value] :
       std::vector<std::pair<std::string, c10::IValue>>{{"lr", -1.0}, {"weight_decay", std::nan("")}, {"lr", "x"}}) {
    auto group = state.toGenericDict().at("param_groups").toListRef()[0].toGenericDict().copy();
    group.insert_or_assign(key, value);
    Dict bad = make_dict();
    bad.insert("state", state.toGenericDict().at("state"));
    bad.insert("param_groups", make_list(std::vector<c10::IValue>{group}));
    EXPECT_THROW(part.load_state_dict(bad), CheckpointError) << key;
    EXPECT_EQ(part.param_groups()[0].options().get_lr(), options.get_lr());
  }
}

TEST_F(OwnOptimizers, StatesHaveDeepSpeedsNamesAndResume) {
  resumes<Lion>(LionOptions(0.01).betas({0.8, 0.9}), {"step", "exp_avg"});
  resumes<DeepSpeedAdam>(DeepSpeedAdamOptions(0.01).bias_correction(false), {"step", "exp_avg", "exp_avg_sq"});
  resumes<Lamb>(LambOptions(0.01).max_coeff(2), {"step", "exp_avg", "exp_avg_sq"});
  resumes<Muon>(MuonOptions().momentum(0.8), {"momentum_buffer"});
  resumes<Muon>(MuonOptions(false).lr(0.01), {"step", "exp_avg", "exp_avg_sq"});
  const auto keys_of = [](const auto& optimizer) {
    const c10::IValue groups = optimizer_state_dict(*optimizer).toGenericDict().at("param_groups");
    std::vector<std::string> keys;
    for (const auto& entry : groups.toListRef()[0].toGenericDict()) keys.push_back(entry.key().toStringRef());
    return keys;
  };
  using testing::UnorderedElementsAre;
  const Tensors one{parameter_of({2, 2})};
  EXPECT_THAT(keys_of(std::make_shared<Lion>(one)), UnorderedElementsAre("lr", "betas", "weight_decay", "params"));
  EXPECT_THAT(keys_of(std::make_shared<DeepSpeedAdam>(one)),
              UnorderedElementsAre("lr", "betas", "eps", "weight_decay", "bias_correction", "amsgrad", "params"));
  EXPECT_THAT(keys_of(std::make_shared<Lamb>(one)),
              UnorderedElementsAre("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff",
                                   "max_grad_norm", "params"));
  const auto muon = std::make_shared<Muon>(std::vector<OptimizerParamGroup>{one});
  EXPECT_THAT(keys_of(muon), UnorderedElementsAre("use_muon", "lr", "weight_decay", "momentum", "ns_method", "params"));
  const auto adam = std::make_shared<Muon>(std::vector<OptimizerParamGroup>{one}, MuonOptions(false));
  EXPECT_THAT(keys_of(adam), UnorderedElementsAre("use_muon", "lr", "weight_decay", "betas", "eps", "params"));
  EXPECT_THAT(message_of<CheckpointError>([&] { load_optimizer_state_dict(*adam, optimizer_state_dict(*muon)); }),
              HasSubstr("found use_muon true, expected false"));
}

TEST_F(OwnOptimizers, GroupsHaveOptionsOfTheirOwn) {
  const auto first = parameter_of({3}), second = parameter_of({3}), third = parameter_of({3});
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors{first});
  groups.emplace_back(Tensors{second}, std::make_unique<LionOptions>(LionOptions().weight_decay(0.5)));
  const AcceleratedOptimizer lion(std::make_shared<Lion>(groups, LionOptions(0.25).betas({0.5, 0.75})));
  lion.add_param_group(OptimizerParamGroup(Tensors{third}, std::make_unique<LionOptions>(0.125)));
  const auto options = [&](size_t i) { return static_cast<LionOptions&>(lion.param_groups()[i].options()); };
  EXPECT_EQ(options(0).lr(), 0.25);
  EXPECT_EQ(options(1).lr(), 0.25) << "what a group leaves out is the optimizer's";
  EXPECT_EQ(options(1).weight_decay(), 0.5);
  EXPECT_EQ(options(2).lr(), 0.125);
  EXPECT_EQ(options(2).betas(), std::tuple(0.5, 0.75));
  EXPECT_THAT(message_of<ConfigError>([&] {
                lion.add_param_group(
                    OptimizerParamGroup(Tensors{parameter_of({3})}, std::make_unique<torch::optim::AdamWOptions>()));
              }),
              AllOf(HasSubstr("AdamWOptions"), HasSubstr("expected LionOptions")));
  EXPECT_EQ(lion.param_groups().size(), 3U);
  // Muon's are all a group's own: its rates for matrices and the rest differ.
  std::vector<OptimizerParamGroup> of_muon;
  of_muon.emplace_back(Tensors{first}, std::make_unique<MuonOptions>(false));
  of_muon.emplace_back(Tensors{parameter_of({2, 2})}, std::make_unique<MuonOptions>());
  of_muon.emplace_back(Tensors{parameter_of({2, 2})});
  Muon muon(of_muon, MuonOptions().lr(0.7));
  std::vector<double> lrs;
  for (const auto& group : muon.param_groups()) lrs.push_back(group.options().get_lr());
  EXPECT_THAT(lrs, ElementsAre(3e-4, 0.02, 0.7));
}

TEST_F(OwnOptimizers, WhatCannotBeIsRefused) {
  const Tensors one{parameter_of({3})};
  EXPECT_THAT(message_of<ConfigError>([&] { Lion(one, LionOptions(-1)); }), HasSubstr("Lion: found lr -1"));
  EXPECT_THAT(message_of<ConfigError>([&] { Lion(one, LionOptions().betas({0.9, 1})); }), HasSubstr("betas"));
  EXPECT_THAT(message_of<ConfigError>([&] { Lamb(one, LambOptions().min_coeff(11)); }), HasSubstr("max_coeff 10"));
  EXPECT_THAT(message_of<ConfigError>([&] { DeepSpeedAdam(Tensors(), DeepSpeedAdamOptions().eps(std::nan(""))); }),
              HasSubstr("eps"));
  EXPECT_THAT(message_of<ConfigError>([&] { Muon({OptimizerParamGroup(one)}); }), HasSubstr("use_muon"));
  EXPECT_THAT(message_of<ConfigError>([&] { Muon({}, MuonOptions().momentum(1)); }), HasSubstr("momentum 1"));
  EXPECT_THAT(message_of<ConfigError>([&] { Muon({}, MuonOptions().ns_method("grams")); }), HasSubstr("'grams'"));
  EXPECT_THAT(message_of<ConfigError>([&] { Lion(Tensors{torch::zeros({2}, at::kLong)}); }), HasSubstr("Long"));
  const auto table = torch::ones({4, 3}, torch::requires_grad());
  Lion lion(Tensors{parameter_of({2}, at::kFloat), table});
  give_gradient(lion.param_groups()[0].params()[0], 0);
  const auto before = lion.param_groups()[0].params()[0].detach().clone();
  table.mutable_grad() = torch::sparse_coo_tensor(torch::tensor({{1}}), torch::ones({1, 3}), {4, 3});
  EXPECT_THAT(message_of<ConfigError>([&] { lion.step(); }), HasSubstr("sparse"));
  EXPECT_TRUE(torch::equal(lion.param_groups()[0].params()[0], before)) << "nothing was stepped on";
  std::ostringstream stream;
  EXPECT_THAT(message_of<ConfigError>([&] { torch::save(lion, stream); }), HasSubstr("Lion"));
}

TEST_F(OwnOptimizers, ClosuresAndMissingGradients) {
  const auto first = torch::ones({3}, torch::requires_grad()), second = torch::ones({3}, torch::requires_grad());
  Lion lion(Tensors{first, second}, LionOptions(0.5));
  const auto loss = lion.step([&] {
    const auto value = first.sum();
    value.backward();
    return value;
  });
  EXPECT_EQ(loss.item<double>(), 3);
  EXPECT_EQ(first[0].item<double>(), 0.5);
  EXPECT_EQ(second[0].item<double>(), 1) << "without a gradient";
}

TEST_F(OwnOptimizers, StepOnPieces) {
  struct Derived : torch::optim::SGD {
    using SGD::SGD;
  };
  const Tensors one{parameter_of({2, 2})};
  EXPECT_TRUE(steps_on_pieces(Lion(one)));
  EXPECT_TRUE(steps_on_pieces(DeepSpeedAdam(one)));
  EXPECT_TRUE(steps_on_pieces(Lamb(one))) << "which asks for norms";
  EXPECT_TRUE(steps_on_pieces(Muon({OptimizerParamGroup(one)}))) << "which asks for matrices";
  static_assert(std::derived_from<Lion, ElementWise> && std::derived_from<DeepSpeedAdam, ElementWise>);
  static_assert(!std::derived_from<Lamb, ElementWise> && !std::derived_from<Muon, ElementWise>);
  EXPECT_FALSE(steps_on_pieces(Derived(one, 0.1)));
  EXPECT_FALSE(has_own_state_dict(Lion(one)));
}

TEST_F(OwnOptimizers, SchedulesMoveTheirBetas) {
  const auto moves = [](auto&& optimizer) {
    const auto schedule =
        deepspeed_one_cycle(optimizer, {.cycle_min_lr = 0, .cycle_max_lr = 1, .cycle_first_step_size = 2});
    schedule.step();
    auto& options = optimizer.param_groups()[0].options();
    EXPECT_EQ(options.get_lr(), 0.5);
    return options.clone();
  };
  const Tensors one{parameter_of({2, 2})};
  const auto betas = [](const auto& options, auto type) {
    return static_cast<const decltype(type)&>(*options).betas();
  };
  EXPECT_NEAR(std::get<0>(betas(moves(Lion(one)), LionOptions())), 0.85, 1e-12);
  EXPECT_NEAR(std::get<0>(betas(moves(Lamb(one)), LambOptions())), 0.85, 1e-12);
  EXPECT_NEAR(std::get<0>(betas(moves(DeepSpeedAdam(one)), DeepSpeedAdamOptions())), 0.85, 1e-12);
  Lion lion(one);
  one_cycle(lion, {.max_lr = {1.0}, .total_steps = 10, .max_momentum = 0.95});
  EXPECT_EQ(static_cast<LionOptions&>(lion.param_groups()[0].options()).betas(), std::tuple(0.95, 0.999));
  AdamW8bit eight(Tensors{parameter_of({2, 2}, at::kFloat)});
  one_cycle(eight, {.max_lr = {1.0}, .total_steps = 10, .max_momentum = 0.95});
  EXPECT_EQ(static_cast<AdamW8bitOptions&>(eight.param_groups()[0].options()).betas(), std::tuple(0.95, 0.999));
}

TEST_F(OwnOptimizers, LossScalesAreDividedAway) {
  for (const bool fused : {false, true}) {
    const auto weight = torch::ones({2}, torch::requires_grad());
    const auto scaler = std::make_shared<GradScaler>(DynamicLossScale{.initial_scale = 1024});
    const AcceleratedOptimizer adam(std::make_shared<DeepSpeedAdam>(Tensors{weight}, DeepSpeedAdamOptions(0.5).eps(1)),
                                    true, scaler, {.fused = fused});
    scaler->scale(weight.sum()).backward();
    adam.step();
    EXPECT_FALSE(adam.step_was_skipped());
    EXPECT_NEAR(weight[0].item<double>(), 0.75, 1e-6);
  }
}

}  // namespace
