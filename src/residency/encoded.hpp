#pragma once

#include <memory>

#include "codes/kernels/packed.hpp"
#include "residency/chain.hpp"

namespace accelerate::residency {

/// On Link::codes while there are weights in few bits: products with them (linear, matmul, mm and addmm with the weight
/// or its transpose) and embeddings are made from the codes, without fetching the weight; gradients flow to the
/// activations and the bias. Other operators are left to *touch*, whose fetch decodes the weight for them. Operators
/// that write to such a weight are refused.
Handler& encoded_handler();

/// For code that computes row by row and has no time for operators: a weight in few bits as products with fp32 read it;
/// counts as a product. Null for other weights, and where the chain or the weight wants products otherwise.
std::shared_ptr<const codes::kernels::Packed> packed_for_rows(const at::Tensor& weight);

}  // namespace accelerate::residency
