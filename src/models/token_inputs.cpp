#include "models/token_inputs.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {

void check_inputs(const TokenInputs& inputs) {
  const auto& [model, ids, mask, positions, past, limit] = inputs;
  if (ids.dim() != 2 || (ids.scalar_type() != at::kLong && ids.scalar_type() != at::kInt))
    raise<ShapeError>("{}::forward: input_ids has shape {} and dtype {}, expected [B, T] of int64.", model, ids.sizes(),
                      c10::toString(ids.scalar_type()));
  const int64_t all = past + ids.size(1);
  if (limit && all > *limit)
    raise<ShapeError>(
        "{}::forward: input_ids has {} tokens a row{}, but the model has positions for {}. Truncate when tokenizing.",
        model, ids.size(1), past ? fmt::format(" after {} in the cache", past) : "", *limit);
  if (mask.defined() && (mask.dim() != 2 || mask.size(0) != ids.size(0) || mask.size(1) != all))
    raise<ShapeError>(
        "{}::forward: attention_mask has shape {}, but input_ids {}{}", model, mask.sizes(), ids.sizes(),
        past ? fmt::format(" after {} tokens in the cache. The mask is for all of them, [B, {}].", past, all)
             : ". Both are [B, T].");
  if (positions.defined() && (positions.dim() != 2 || positions.size(1) != ids.size(1) ||
                              (positions.size(0) != 1 && positions.size(0) != ids.size(0))))
    raise<ShapeError>("{}::forward: position_ids has shape {}, but input_ids {}, expected [B, T] or [1, T].", model,
                      positions.sizes(), ids.sizes());
}

}  // namespace accelerate::models
