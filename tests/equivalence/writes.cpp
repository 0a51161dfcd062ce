#include "writes.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <stdexcept>

namespace equivalence {
namespace {

void write(const at::Tensor& parameter, const at::Tensor& image, const std::string& kind, double value, uint64_t seed) {
  at::Tensor p = parameter;
  const auto drawn = [&] {
    return at::randn(p.sizes(), at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble)
        .mul_(0.3)
        .to(image.scalar_type())
        .to(p.scalar_type());
  };
  if (kind == "mul") p.mul_(value);
  else if (kind == "add") p.add_(value);
  else if (kind == "copy") p.copy_(drawn());
  else if (kind == "lerp") p.lerp_(drawn(), 0.1);
  else if (kind == "zero") p.zero_();
  else if (kind == "fill") p.fill_(value);
  else if (kind == "clamp" && !p.is_complex()) p.clamp_(-std::abs(value), std::abs(value));
  else if (kind == "constant") torch::nn::init::constant_(p, value);
  else if (kind == "row" && p.dim() > 0 && p.size(0) > 1) p.select(0, 1).mul_(value);  // a view of it
  else if (kind == "index" && p.dim() > 0 && p.size(0) > 1) p[0] = value;
  else if (kind == "scaled" && p.numel() > 0) p.div_(image.abs().max() + 0.5);
  else if (kind == "own_copy") p.copy_(image.clone().mul_(value));
  else if (kind == "nudge")  // each less than bf16 has room for
    for (int i = 0; i < 40; ++i) p.mul_(1.0015);
}

}  // namespace

void write_parameters(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images,
                      const Operation& operation) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters.size());
  const int64_t index = operation.integer("index", -1);
  for (int64_t i = 0; i < count; ++i) {
    if (index >= 0 && index % count != i) continue;
    write(parameters[static_cast<size_t>(i)], images[static_cast<size_t>(i)], operation.word("kind", "mul"),
          operation.number("value", 0.9), static_cast<uint64_t>(operation.integer("data") * 100 + i));
  }
}

void MovingAverage::update(const std::vector<at::Tensor>& images, double decay) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < images.size(); ++i) {
    if (averages_.size() <= i) averages_.push_back(images[i].detach().clone());
    else averages_[i].mul_(decay).add_(images[i].detach(), 1 - decay);
  }
}

void MovingAverage::swap(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images) {
  at::NoGradGuard no_grad;
  if (averages_.empty()) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor kept = images[i].detach().clone();
    at::Tensor(parameters[i]).copy_(averages_[i]);
    averages_[i].copy_(kept);
  }
}

void scale_gradients(const std::vector<at::Tensor>& parameters, const Operation& operation) {
  at::NoGradGuard no_grad;
  const double factor = operation.number("factor");
  for (auto parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    if (operation.integer("new") != 0) parameter.mutable_grad() = parameter.grad() * factor;
    else parameter.mutable_grad().mul_(factor);
  }
}

void set_trained(const std::vector<at::Tensor>& parameters, const Operation& operation) {
  const auto count = static_cast<int64_t>(parameters.size());
  const int64_t index = operation.integer("index") % count;
  // The last one stays trained, so that there is a loss to go back from.
  if (index == count - 1) return;
  at::Tensor parameter = parameters[static_cast<size_t>(index)];
  parameter.set_requires_grad(operation.verb == "unfreeze");
}

void hand_step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images, double rate) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor parameter = parameters[i];
    if (parameter.grad().defined()) parameter.sub_(rate * parameter.grad().to(images[i].scalar_type()));
  }
}

}  // namespace equivalence
