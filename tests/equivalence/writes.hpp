#pragma once

#include <torch/torch.h>

#include "case.hpp"

namespace equivalence {

// What programs read of parameters are their images: in mixed precision sharded layouts show 16 bits or codes, and keep
// what is written in the precision of the parameters. Where the images are the parameters themselves, both are the
// same.

/// `write kind=… value=… index=…`: in-place operators on all parameters, or on one of them, as programs write them.
void write_parameters(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images,
                      const Operation& operation);

/// An average of the parameters that a program keeps, and changes places with.
class MovingAverage {
 public:
  void update(const std::vector<at::Tensor>& images, double decay);
  void swap(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images);

 private:
  std::vector<at::Tensor> averages_;
};

/// `scale_grad factor=…`: p.grad() *= factor, or with `new=1` another tensor in its place.
void scale_gradients(const std::vector<at::Tensor>& parameters, const Operation& operation);

/// `freeze index=…`, `unfreeze index=…`: one parameter of those that compute gradients, or of those that don't.
void set_trained(const std::vector<at::Tensor>& parameters, const Operation& operation);

/// A step by hand.
void hand_step(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& images, double rate);

}  // namespace equivalence
