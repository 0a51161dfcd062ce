#include "accelerate/optim/muon.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>

#include "optim/describe_own.hpp"
#include "optim/own_step.hpp"

namespace accelerate::optim {
namespace {

// The quintic's coefficients; few iterations are enough, as singular values need only come near to 1.
constexpr double kMuonA = 3.4445, kMuonB = -4.7750, kMuonC = 2.0315;
constexpr int kNewtonSchulzSteps = 5;

/// A polynomial of a product x * x^T, times which x comes nearer to being orthogonal, less its part kMuonA.
at::Tensor quintic(const at::Tensor& product) {
  return product.mul(kMuonB).add_(at::matmul(product.mul(kMuonC), product));
}

at::Tensor newton_schulz(at::Tensor x) {
  for (int i = 0; i < kNewtonSchulzSteps; ++i) x = x.mul(kMuonA).add_(at::matmul(quintic(at::matmul(x, x.mT())), x));
  return x;
}

/// The same for a matrix that is wider than high, by its product with itself, which is small. Begun anew where rounding
/// in 16 bits would show.
at::Tensor gram_newton_schulz(at::Tensor x) {
  constexpr int kRestart = 2;
  const auto identity = at::eye(x.size(-2), x.options()).mul_(kMuonA);
  at::Tensor product = at::matmul(x, x.mT()), factor = at::Tensor();
  for (int i = 0; i < kNewtonSchulzSteps; ++i) {
    if (i == kRestart) {
      x = at::matmul(factor, x);
      product = at::matmul(x, x.mT());
      factor = at::Tensor();
    }
    const auto z = quintic(product);
    factor = factor.defined() ? factor.mul(kMuonA).add_(at::matmul(z, factor)) : z + identity;
    if (i + 1 == kNewtonSchulzSteps || i + 1 == kRestart) continue;
    const auto half = product.mul(kMuonA).add_(at::matmul(z, product));
    product = half.mul(kMuonA).add_(at::matmul(z, half));
  }
  return at::matmul(factor, x);
}

/// Nearly the orthogonal matrix that is nearest to this one, or to each of these.
at::Tensor orthogonalized(const at::Tensor& matrices, const std::string& method) {
  const bool high = matrices.size(-2) > matrices.size(-1);
  const at::Tensor wide = high ? matrices.mT() : matrices;
  const std::array<int64_t, 2> axes{-2, -1};
  const bool gram = method == "gram";
  const auto type = gram ? (wide.is_cuda() ? at::kHalf : wide.scalar_type()) : at::kBFloat16;
  // No singular value is larger than the norm.
  const auto scaled = [&](const at::Tensor& x) {
    return x / at::linalg_vector_norm(x, 2, axes, /*keepdim=*/true).add_(1e-7);
  };
  const at::Tensor begin = gram ? scaled(wide).to(type) : scaled(wide.to(type));
  const at::Tensor found = gram && wide.size(-1) > wide.size(-2) ? gram_newton_schulz(begin) : newton_schulz(begin);
  return (high ? found.mT() : found).to(matrices.scalar_type());
}

/// Nesterov's momentum, the matrix that is to be made orthogonal. @return as large as the gradient
at::Tensor muon_ahead(const MuonOptions& o, const at::Tensor& gradient, const Wide& momentum) {
  momentum.value.lerp_(gradient, 1 - o.momentum());
  return gradient.lerp(momentum.value, o.momentum());
}

at::Tensor muon_update(const MuonOptions& o, const at::Tensor& ahead) {
  const auto matrix = ahead.dim() == 4 ? ahead.reshape({ahead.size(0), -1}) : ahead;
  return orthogonalized(matrix, o.ns_method()).reshape(ahead.sizes());
}

/// @param sizes  of the whole matrix, where `parameter` and `update` are of a shard
void muon_take(const MuonOptions& o, const Wide& parameter, const at::Tensor& update, at::IntArrayRef sizes) {
  const auto rows = static_cast<double>(sizes[sizes.size() - 2]), columns = static_cast<double>(sizes.back());
  parameter.value.mul_(1 - o.lr() * o.weight_decay());
  parameter.value.sub_(update, o.lr() * std::sqrt(std::max(1.0, rows / columns)));
}

void adam_step(const MuonOptions& o, int64_t number, const Wide& parameter, const at::Tensor& gradient,
               const Wide& first, const Wide& second) {
  const auto [beta1, beta2] = o.betas();
  const auto step = static_cast<double>(number);
  const auto g = o.adam_w_mode() ? gradient : gradient.add(parameter.value, o.weight_decay());
  first.value.lerp_(g, 1 - beta1);
  second.value.lerp_(g.square(), 1 - beta2);
  const auto root = second.value.div(1 - std::pow(beta2, step)).sqrt_().add_(o.eps());
  if (o.adam_w_mode()) parameter.value.mul_(1 - o.lr() * o.weight_decay());
  parameter.value.addcdiv_(first.value, root, -o.lr() / (1 - std::pow(beta1, step)));
}

}  // namespace

Muon::Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups, const MuonOptions& defaults)
    : OwnOptimizer(DescribeMuon::kName, std::make_unique<MuonOptions>(defaults)) {
  add_param_groups(groups);
}

std::unique_ptr<torch::optim::OptimizerOptions> Muon::options_for(
    const torch::optim::OptimizerParamGroup& group) const {
  auto options = options_of_own<DescribeMuon>(group, defaults(), /*inherits=*/false);
  if (static_cast<const MuonOptions&>(*options).use_muon())
    for (const auto& parameter : group.params())
      if (parameter.dim() < 2)
        raise<ConfigError>(
            "Muon: found a parameter {} in a group with use_muon, expected matrices, or tensors of more axes; put it "
            "into one with MuonOptions(/*use_muon=*/false), as muon_groups() does",
            parameter.sizes());
  return options;
}

void Muon::step_on_all() {
  std::vector<at::Tensor> pieces;
  std::vector<const MuonOptions*> options;
  for (const auto& group : param_groups())
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const auto& o = static_cast<const MuonOptions&>(group.options());
      if (o.use_muon() && pieces_of(parameter)) pieces.push_back(parameter), options.push_back(&o);
      else step_on(parameter, o);
    }
  if (pieces.empty()) return;
  const Shards& shared = *pieces_of(pieces.front());
  shared.share_out(pieces, {.values =
                                [&](size_t i) {
                                  const Wide gradient(pieces[i].grad()), momentum(momentum_of(pieces[i]));
                                  const auto ahead = muon_ahead(*options[i], gradient.value, momentum);
                                  momentum.put();
                                  return ahead;
                                },
                            .make = [&](size_t i, const at::Tensor& ahead) { return muon_update(*options[i], ahead); },
                            .take =
                                [&](size_t i, const at::Tensor& update) {
                                  const Wide parameter(pieces[i]);
                                  muon_take(*options[i], parameter, update, shared.whole_sizes(pieces[i]));
                                  parameter.put();
                                }});
}

at::Tensor Muon::momentum_of(const at::Tensor& parameter) {
  return state_at<MuonParamState>(*this, parameter,
                                  [&](auto& made) { made.momentum_buffer(at::zeros_like(parameter)); })
      .momentum_buffer();
}

void Muon::step_on(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) {
  const auto& o = static_cast<const MuonOptions&>(options);
  const Wide p(parameter), g(parameter.grad());
  if (o.use_muon()) {
    const Wide momentum(momentum_of(parameter));
    muon_take(o, p, muon_update(o, muon_ahead(o, g.value, momentum)), parameter.sizes());
    momentum.put();
  } else {
    auto& state = state_at<MuonParamState>(*this, parameter, [&](auto& made) {
      made.exp_avg(at::zeros_like(parameter)).exp_avg_sq(at::zeros_like(parameter));
    });
    state.step(state.step() + 1);
    const Wide first(state.exp_avg()), second(state.exp_avg_sq());
    adam_step(o, state.step(), p, g.value, first, second);
    first.put(), second.put();
  }
  p.put();
}

std::vector<torch::optim::OptimizerParamGroup> muon_groups(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters, const MuonOptions& matrices,
    const MuonOptions& rest) {
  std::vector<at::Tensor> of_muon, of_adam;
  for (const auto& [name, parameter] : named_parameters) {
    std::string lower = name;
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    const bool outer = lower.find("embed") != std::string::npos || lower.find("lm_head") != std::string::npos;
    (parameter.dim() >= 2 && !outer ? of_muon : of_adam).push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  if (!of_muon.empty())
    groups.emplace_back(of_muon, std::make_unique<MuonOptions>(MuonOptions(matrices).use_muon(true)));
  if (!of_adam.empty()) groups.emplace_back(of_adam, std::make_unique<MuonOptions>(MuonOptions(rest).use_muon(false)));
  return groups;
}

}  // namespace accelerate::optim
