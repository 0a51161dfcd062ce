#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

/// The models of the fuzzer: tiny, and each awkward in one way. Plain LibTorch.
namespace equivalence {

struct Net : torch::nn::Module {
  virtual at::Tensor forward(at::Tensor x) = 0;
  /// A batch of so many rows.
  virtual at::Tensor input(int64_t rows, const at::Generator& generator) const;
  /// The target to come near; of the output's sizes.
  virtual at::Tensor target(const at::Tensor& output, const at::Tensor& input) const;
  /// Which of its branches a model uses that has some: 0 both, 1 and 2 one of them.
  int64_t part = 0;
  /// The dtype of its inputs: the parameters' as they were made, whatever it computes in.
  at::ScalarType reads = at::kDouble;
  /// A part of the forward that may run again in backward; by default it just runs.
  using Segment = std::function<at::Tensor(const at::Tensor&)>;
  std::function<at::Tensor(const Segment&, const at::Tensor&)> run_segment =
      [](const Segment& segment, const at::Tensor& x) { return segment(x); };
};

std::vector<std::string> model_names();
/// Same values from the same seed. @param dtype  "f64", "f32" or "bf16"
std::shared_ptr<Net> make_model(const std::string& name, uint64_t seed, const std::string& dtype);

/// A batch: of the same seed the same.
at::Tensor batch_of(const Net& net, int64_t rows, uint64_t seed);
/// A floating-point batch as the program gives it to a model that has 16 bits throughout.
inline at::Tensor as_read(const at::Tensor& batch, const std::string& precision) {
  return batch.is_floating_point() ? batch.to(precision == "bf16" ? at::kBFloat16 : at::kHalf) : batch;
}
/// Smooth, and at most of the order of 1, so that a large rate does not let it run away. In fp32 at least.
at::Tensor loss_of(const Net& net, const at::Tensor& output, const at::Tensor& input);

/// Parameters, each once, with its first name (LibTorch lists a tied one under each).
std::vector<std::pair<std::string, at::Tensor>> parameters_of(const torch::nn::Module& module);
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module);
/// The finds of torch::autograd::grad(), in the order of the parameters; undefined for frozen and unused ones.
std::vector<at::Tensor> captured_gradients(const at::Tensor& loss, const std::vector<at::Tensor>& parameters);

}  // namespace equivalence
