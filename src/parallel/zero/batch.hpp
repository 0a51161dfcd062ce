#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace accelerate::zero {

/// train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks.
struct Batch {
  std::optional<int64_t> train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps;
};

/// Fills what is missing, by integer division as DeepSpeed does; accumulation is 1 where it can be.
/// @return what is wrong, naming the number that is, or nothing. Conformance: deepspeed_batch.json
std::string complete(Batch& batch, int64_t ranks);

}  // namespace accelerate::zero
