#pragma once

#include <optional>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "accelerate/model/no_split.hpp"
#include "models/row_operators.hpp"

/// Layers that several architectures share. They start uninitialised: weights come from a file, or from the model's own
/// initialiser.
namespace accelerate::models::detail {

/// A linear layer. torch::nn::Linear would spend time on weights that are replaced at once, and in three dimensions it
/// adds the bias in a pass of its own, which project() fuses into the product. One whose weight is stored as [inputs,
/// outputs] is transformers' Conv1D, and of that class.
class Dense : public torch::nn::Cloneable<Dense> {
 public:
  Dense(int64_t inputs, int64_t outputs, bool with_bias = true, bool transposed = false)
      : Cloneable(transposed ? "accelerate::models::detail::Conv1D" : "accelerate::models::detail::Dense"),
        inputs_(inputs),
        outputs_(outputs),
        with_bias_(with_bias),
        transposed_(transposed) {
    reset();
  }

  void reset() override {
    weight_ = register_parameter("weight",
                                 transposed_ ? torch::empty({inputs_, outputs_}) : torch::empty({outputs_, inputs_}));
    if (with_bias_) bias_ = register_parameter("bias", torch::empty({outputs_}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return transposed_ ? at::linear(x, weight_.t(), bias_) : project(x, weight_, bias_);
  }
  const torch::Tensor& weight() const { return weight_; }
  const torch::Tensor& bias() const { return bias_; }  ///< undefined where there is none

 private:
  int64_t inputs_, outputs_;
  bool with_bias_, transposed_;
  torch::Tensor weight_, bias_;
};

/// Scales each row to a mean square of 1. Source: arXiv:1910.07467.
class RmsNorm : public torch::nn::Cloneable<RmsNorm> {
 public:
  RmsNorm(int64_t size, double eps) : size_(size), eps_(eps) { reset(); }

  void reset() override { weight_ = register_parameter("weight", torch::empty({size_})); }
  torch::Tensor forward(const torch::Tensor& x) { return rms_norm(x, weight_, eps_); }
  const torch::Tensor& weight() const { return weight_; }
  double eps() const { return eps_; }

 private:
  int64_t size_;
  double eps_;
  torch::Tensor weight_;
};

inline torch::nn::LayerNorm make_layer_norm(int64_t size, double eps, bool with_weights = true) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({size}).eps(eps).elementwise_affine(with_weights));
}

inline torch::nn::Embedding make_embedding(int64_t count, int64_t size,
                                           std::optional<int64_t> padding_idx = std::nullopt) {
  auto options = torch::nn::EmbeddingOptions(count, size)._weight(torch::empty({count, size}));
  options.padding_idx(padding_idx);
  torch::nn::Embedding embedding(options);
  embedding->options._weight(torch::Tensor());  // else clones would share it
  return embedding;
}

}  // namespace accelerate::models::detail
