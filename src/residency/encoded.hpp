#pragma once

#include "residency/chain.hpp"

namespace accelerate::residency {

/// On Link::codes while there are weights in few bits: products with them (linear, matmul, mm and addmm with the weight
/// or its transpose) and embeddings are made from the codes, without fetching the weight; gradients flow to the
/// activations and the bias. Other operators are left to *touch*, whose fetch decodes the weight for them. Operators
/// that write to such a weight are refused.
Handler& encoded_handler();

}  // namespace accelerate::residency
