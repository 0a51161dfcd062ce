#include "models/token_inputs.hpp"

#include <sstream>

#include "accelerate/utils/error.hpp"

namespace accelerate::models {

void check_inputs(const TokenInputs& inputs) {
  const auto& [model, ids, mask, positions, past, limit] = inputs;
  std::ostringstream text;
  text << model << "::forward: ";
  if (ids.dim() != 2 || (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt)) {
    text << "input_ids has shape " << ids.sizes() << " and dtype " << ids.scalar_type()
         << ", expected [B, T] of int64.";
  } else if (limit && past + ids.size(1) > *limit) {
    text << "input_ids has " << ids.size(1) << " tokens a row";
    if (past) text << " after " << past << " in the cache";
    text << ", but the model has positions for " << *limit << ". Truncate when tokenizing.";
  } else if (mask.defined() && (mask.dim() != 2 || mask.size(0) != ids.size(0) || mask.size(1) != past + ids.size(1))) {
    text << "attention_mask has shape " << mask.sizes() << ", but input_ids " << ids.sizes();
    past ? text << " after " << past << " tokens in the cache. The mask is for all of them, [B, " << past + ids.size(1)
                << "]."
         : text << ". Both are [B, T].";
  } else if (positions.defined() && (positions.dim() != 2 || positions.size(1) != ids.size(1) ||
                                     (positions.size(0) != 1 && positions.size(0) != ids.size(0)))) {
    text << "position_ids has shape " << positions.sizes() << ", but input_ids " << ids.sizes()
         << ", expected [B, T] or [1, T].";
  } else {
    return;
  }
  throw ShapeError(text.str());
}

}  // namespace accelerate::models
