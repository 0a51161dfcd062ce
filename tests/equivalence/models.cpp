#include "models.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <functional>
#include <map>
#include <stdexcept>
#include <unordered_set>

#include "small_gpt.hpp"

namespace equivalence {
namespace {

namespace nn = torch::nn;

struct Mlp : Net {
  Mlp() {
    first = register_module("first", nn::Linear(5, 7));
    second = register_module("second", nn::Linear(7, 6));
    head = register_module("head", nn::Linear(6, 3));
  }
  at::Tensor forward(at::Tensor x) override {
    x = torch::tanh(first(x));
    return head(run_segment([this](const at::Tensor& h) { return torch::tanh(second(h)); }, x));
  }
  nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
};

struct Frozen : Mlp {
  Frozen() {
    for (auto& parameter : first->parameters()) parameter.set_requires_grad(false);
    second->bias.set_requires_grad(false);
  }
};

struct Conv : Net {
  Conv() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 4, 3)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    head = register_module("head", nn::Linear(36, 3));
  }
  at::Tensor forward(at::Tensor x) override { return head(torch::tanh(norm(conv(x))).flatten(1)); }
  at::Tensor input(int64_t rows, const at::Generator& generator) const override {
    return at::randn({rows + 1, 2, 5, 5}, generator, at::kDouble).to(reads);
  }
  nn::Conv2d conv{nullptr};
  nn::BatchNorm2d norm{nullptr};
  nn::Linear head{nullptr};
};

struct Tied : Net {
  Tied() {
    embedding = register_module("embedding", nn::Embedding(11, 6));
    body = register_module("body", nn::Linear(6, 6));
    tied = register_parameter("tied", embedding->weight);
  }
  at::Tensor forward(at::Tensor ids) override { return torch::linear(torch::tanh(body(embedding(ids).mean(1))), tied); }
  at::Tensor input(int64_t rows, const at::Generator& generator) const override {
    return at::randint(0, 11, {rows, 4}, generator, at::kLong);
  }
  nn::Embedding embedding{nullptr};
  nn::Linear body{nullptr};
  at::Tensor tied;
};

struct SmallGpt : Net {
  SmallGpt() { gpt = register_module("gpt", support::Gpt(13, 8, 2)); }
  at::Tensor forward(at::Tensor ids) override { return gpt(ids); }
  at::Tensor input(int64_t rows, const at::Generator& generator) const override {
    return at::randint(0, 13, {rows, 5}, generator, at::kLong);
  }
  support::Gpt gpt{nullptr};
};

/// One cell, used again and again with its own output.
struct Recurrent : Net {
  Recurrent() {
    cell = register_module("cell", nn::Linear(5, 5));
    head = register_module("head", nn::Linear(5, 3));
  }
  at::Tensor forward(at::Tensor x) override {
    for (int step = 0; step < 3; ++step)
      x = run_segment([this](const at::Tensor& h) { return torch::tanh(cell(h)) + 0.5 * h; }, x);
    return head(x);
  }
  nn::Linear cell{nullptr}, head{nullptr};
};

/// A running mean and a counter, written in forward as a batch norm does.
struct Buffers : Net {
  Buffers() {
    body = register_module("body", nn::Linear(5, 6));
    head = register_module("head", nn::Linear(6, 3));
    mean = register_buffer("mean", at::zeros({6}));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(at::Tensor x) override {
    x = torch::tanh(body(x));
    if (is_training()) {
      at::NoGradGuard no_grad;
      mean.mul_(0.9).add_(x.detach().mean(0).to(mean.scalar_type()), 0.1);
      calls.add_(1);
    }
    return head(x - mean.to(x.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
  }
  nn::Linear body{nullptr}, head{nullptr};
  at::Tensor mean, calls;
};

/// Parameters without dimensions, of one element, and of none.
struct Odd : Net {
  Odd() {
    body = register_module("body", nn::Linear(5, 4));
    head = register_module("head", nn::Linear(4, 3));
    scale = register_parameter("scale", at::full({}, 0.7));
    shift = register_parameter("shift", at::full({1}, 0.1));
    nothing = register_parameter("nothing", at::zeros({0, 3}));
  }
  at::Tensor forward(at::Tensor x) override { return head(torch::tanh(body(x)) * scale + shift) + nothing.sum(); }
  nn::Linear body{nullptr}, head{nullptr};
  at::Tensor scale, shift, nothing;
};

struct Complex : Net {
  Complex() {
    body = register_module("body", nn::Linear(5, 4));
    weight = register_parameter("weight", at::randn({4, 3}, at::kComplexDouble) * 0.5);
  }
  at::Tensor forward(at::Tensor x) override {
    const at::Tensor y = torch::tanh(body(x)).to(weight.scalar_type()).matmul(weight);
    return at::real(y) + at::imag(y).pow(2);
  }
  nn::Linear body{nullptr};
  at::Tensor weight;
};

/// Two heads, of which a forward uses both or one.
struct Branches : Net {
  Branches() {
    body = register_module("body", nn::Linear(5, 6));
    left = register_module("left", nn::Linear(6, 4));
    right = register_module("right", nn::Linear(6, 4));
  }
  at::Tensor forward(at::Tensor x) override {
    x = torch::tanh(body(x));
    return part == 1 ? left(x) : part == 2 ? right(x) : left(x) + torch::tanh(right(x));
  }
  nn::Linear body{nullptr}, left{nullptr}, right{nullptr};
};

using Make = std::function<std::shared_ptr<Net>()>;
template <class T> Make maker() {
  return [] { return std::make_shared<T>(); };
}

const std::map<std::string, Make>& models() {
  static const std::map<std::string, Make> all = {{"mlp", maker<Mlp>()},         {"frozen", maker<Frozen>()},
                                                  {"conv", maker<Conv>()},       {"tied", maker<Tied>()},
                                                  {"gpt", maker<SmallGpt>()},    {"recurrent", maker<Recurrent>()},
                                                  {"buffers", maker<Buffers>()}, {"odd", maker<Odd>()},
                                                  {"complex", maker<Complex>()}, {"branches", maker<Branches>()}};
  return all;
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "f64") return at::kDouble;
  if (name == "f32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  throw std::runtime_error("case: unknown dtype " + name);
}

}  // namespace

at::Tensor Net::input(int64_t rows, const at::Generator& generator) const {
  return at::randn({rows, 5}, generator, at::kDouble).to(reads);
}

at::Tensor Net::target(const at::Tensor& output, const at::Tensor& input) const {
  // Made from the input alone, so that there is something to learn; and as large as what the model can give.
  const at::Tensor sums = input.to(at::kDouble).flatten(1).sum(1);
  at::Tensor target = at::sin(sums);
  for (int64_t dim = 1; dim < output.dim(); ++dim) target = target.unsqueeze(-1);
  return target.expand(output.sizes()).to(output.scalar_type());
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : models()) names.push_back(name);
  return names;
}

std::shared_ptr<Net> make_model(const std::string& name, uint64_t seed, const std::string& dtype) {
  const auto found = models().find(name);
  if (found == models().end()) throw std::runtime_error("case: unknown model " + name);
  torch::manual_seed(seed);
  auto net = found->second();
  // By hand, as Module::to would make tied parameters two, and complex ones real.
  at::NoGradGuard no_grad;
  // Ranks of other seeds begin with other buffers, which shows whose are taken.
  for (const auto& buffer : net->named_buffers()) {
    if (name != "buffers" && name != "conv") continue;
    if (buffer.value().is_floating_point()) buffer.value().uniform_(0.5, 1.5);
    else buffer.value().fill_(static_cast<int64_t>(seed % 5));
  }
  const auto type = net->reads = dtype_of(dtype);
  std::unordered_set<const at::TensorImpl*> seen;
  auto tensors = net->parameters();
  for (const auto& buffer : net->buffers()) tensors.push_back(buffer);
  for (auto& tensor : tensors) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    if (tensor.is_floating_point()) tensor.set_data(tensor.to(type));
    else if (tensor.is_complex() && type != at::kDouble) tensor.set_data(tensor.to(at::kComplexFloat));
  }
  return net;
}

at::Tensor batch_of(const Net& net, int64_t rows, uint64_t seed) {
  return net.input(rows, at::make_generator<at::CPUGeneratorImpl>(seed));
}

at::Tensor loss_of(const Net& net, const at::Tensor& output, const at::Tensor& input) {
  const at::Tensor wide = at::isReducedFloatingType(output.scalar_type()) ? output.to(at::kFloat) : output;
  return torch::smooth_l1_loss(wide, net.target(wide, input));
}

std::vector<std::pair<std::string, at::Tensor>> parameters_of(const nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> each;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) each.emplace_back(item.key(), item.value());
  return each;
}

std::vector<at::Tensor> tensors_of(const nn::Module& module) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters_of(module)) tensors.push_back(tensor);
  return tensors;
}

std::vector<at::Tensor> captured_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> trained, all(parameters.size());
  for (const auto& parameter : parameters)
    if (parameter.requires_grad()) trained.push_back(parameter);
  if (trained.empty()) return all;
  const auto found = torch::autograd::grad({loss}, trained, {}, false, false, /*allow_unused=*/true);
  for (size_t p = 0, next = 0; p < all.size(); ++p)
    if (parameters[p].requires_grad()) all[p] = found[next++];
  return all;
}

}  // namespace equivalence
