#pragma once

#include "accelerate/model/model_ref.hpp"

namespace accelerate {

/// Floating-point operations of one token, by the rule of accelerate::report_flops().
struct FlopsPerToken {
  double forward = 0, backward = 0;
};
FlopsPerToken flops_per_token(const ModelRef& model);

}  // namespace accelerate
