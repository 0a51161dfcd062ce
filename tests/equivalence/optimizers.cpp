#include "optimizers.hpp"

#include <cmath>
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>

#include "accelerate/optim/adam8bit.hpp"
#include "accelerate/optim/deepspeed_adam.hpp"

namespace equivalence {
namespace {

namespace optim = torch::optim;
using Parameters = std::vector<at::Tensor>;

/// An optimizer of somebody else's: signs of gradients, with a step that grows. Known to nobody as element-wise.
struct SignOptions : optim::OptimizerCloneableOptions<SignOptions> {
  explicit SignOptions(double lr = 0.01) : lr_(lr) {}
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }
  TORCH_ARG(double, lr);
};
/// p -= lr * g / norm(g): of the whole tensor, so that pieces of it would be another algorithm.
class Normalised : public optim::Optimizer {
 public:
  Normalised(const Parameters& parameters, double rate)
      : Optimizer({optim::OptimizerParamGroup(parameters)}, std::make_unique<SignOptions>(rate)) {}
  at::Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard no_grad;
    for (auto& group : param_groups())
      for (auto& parameter : group.params())
        if (parameter.grad().defined() && parameter.numel() > 0)
          parameter.sub_(parameter.grad() / (parameter.grad().norm() + 1e-3) * group.options().get_lr());
    return {};
  }
};

/// DeepSpeed's Adam for the host, written out: each step in fp32, whatever parameters have, which are rounded
/// once; moments stay fp32.
class HostAdam : public optim::AdamW {
 public:
  using AdamW::AdamW;
  at::Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard no_grad;
    for (auto& group : param_groups()) {
      const auto& options = static_cast<const optim::AdamWOptions&>(group.options());
      const auto [beta1, beta2] = options.betas();
      for (auto& parameter : group.params()) {
        if (!parameter.grad().defined()) continue;
        const at::Tensor value = parameter.to(at::kFloat), gradient = parameter.grad().to(at::kFloat);
        auto& place = state()[parameter.unsafeGetTensorImpl()];
        if (!place) {
          auto fresh = std::make_unique<optim::AdamWParamState>();
          fresh->step(0), fresh->exp_avg(at::zeros_like(value)), fresh->exp_avg_sq(at::zeros_like(value));
          place = std::move(fresh);
        }
        auto& own = static_cast<optim::AdamWParamState&>(*place);
        own.step(own.step() + 1);
        const auto steps = static_cast<double>(own.step());
        own.exp_avg().mul_(beta1).add_(gradient, 1 - beta1);
        own.exp_avg_sq().mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
        const at::Tensor root = own.exp_avg_sq().sqrt() / std::sqrt(1 - std::pow(beta2, steps)) + options.eps();
        parameter.copy_(value * (1 - options.lr() * options.weight_decay()) -
                        options.lr() / (1 - std::pow(beta1, steps)) * own.exp_avg() / root);
      }
    }
    return {};
  }
};

using Make = std::function<std::unique_ptr<optim::Optimizer>(const Parameters&, double rate, double eps)>;

const std::map<std::string, Make>& makers() {
  static const std::map<std::string, Make> all = {
      {"sgd",
       [](const auto& p, double rate, double) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(rate)); }},
      {"momentum",
       [](const auto& p, double rate, double) {
         return std::make_unique<optim::SGD>(p, optim::SGDOptions(rate).momentum(0.8).weight_decay(0.01));
       }},
      {"adamw",
       [](const auto& p, double rate, double eps) {
         return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.2 * rate).eps(eps).weight_decay(0.1));
       }},
      {"adam", [](const auto& p, double rate,
                  double eps) { return std::make_unique<optim::Adam>(p, optim::AdamOptions(0.2 * rate).eps(eps)); }},
      {"adagrad",
       [](const auto& p, double rate, double eps) {
         return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.2 * rate).eps(eps));
       }},
      // Its codes have tests of their own; here it is one more optimizer that must get the right gradients.
      {"adamw8bit",
       [](const auto& p, double rate, double eps) {
         return std::make_unique<accelerate::optim::AdamW8bit>(
             p, accelerate::optim::AdamW8bitOptions(0.2 * rate).eps(eps).min_8bit_size(16));
       }},
      {"host_adam",
       [](const auto& p, double rate, double eps) {
         return std::make_unique<accelerate::optim::DeepSpeedAdam>(
             p, accelerate::optim::DeepSpeedAdamOptions(0.2 * rate).eps(eps).weight_decay(0.1));
       }},
      {"host_adam_written_out",
       [](const auto& p, double rate, double eps) {
         return std::make_unique<HostAdam>(p, optim::AdamWOptions(0.2 * rate).eps(eps).weight_decay(0.1));
       }},
      {"foreign", [](const auto& p, double rate, double) { return std::make_unique<Normalised>(p, 0.2 * rate); }}};
  return all;
}

}  // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers()) names.push_back(name);
  return names;
}

std::vector<std::unique_ptr<optim::Optimizer>> make_optimizers(const std::string& names, const Parameters& parameters,
                                                               double rate, bool precise) {
  std::vector<std::string> each;
  std::istringstream text(names);
  for (std::string name; std::getline(text, name, '+');) each.push_back(name);
  std::vector<std::unique_ptr<optim::Optimizer>> optimizers;
  for (size_t i = 0; i < each.size(); ++i) {
    const auto found = makers().find(each[i]);
    if (found == makers().end()) throw std::runtime_error("case: unknown optimizer " + each[i]);
    Parameters own;
    for (size_t p = i; p < parameters.size(); p += each.size()) own.push_back(parameters[p]);
    optimizers.push_back(found->second(own, rate, precise ? 1e-8 : 1e-2));
  }
  return optimizers;
}

}  // namespace equivalence
