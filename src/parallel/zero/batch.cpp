#include "parallel/zero/batch.hpp"

#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

/// a / b, and 0 for what no division gives: 0 is an error later, which names the number.
int64_t share(int64_t a, int64_t b) { return b > 0 ? a / b : 0; }

}  // namespace

std::string complete(Batch& batch, int64_t ranks) {
  auto& [all, micro, steps] = batch;
  const Batch given = batch;
  // A number that is given must be right by itself before anything is made of it.
  const auto positive = [](const char* name, const std::optional<int64_t>& number) {
    return !number || *number > 0 ? std::string()
                                  : fmt::format("'{}' is {}, expected a whole number above 0", name, *number);
  };
  for (const auto& [name, number] :
       {std::pair("train_batch_size", &all), std::pair("train_micro_batch_size_per_gpu", &micro),
        std::pair("gradient_accumulation_steps", &steps)})
    if (const auto problem = positive(name, *number); !problem.empty()) return problem;
  // Sizes of some 10^9 have a product that fits; beyond that nobody has that many samples.
  constexpr int64_t kMost = int64_t{1} << 31;
  for (const auto& [name, number] :
       {std::pair("train_batch_size", &all), std::pair("train_micro_batch_size_per_gpu", &micro),
        std::pair("gradient_accumulation_steps", &steps)})
    if (number->value_or(0) > kMost || (number != &all && number->value_or(0) > kMost / ranks))
      return fmt::format("'{}' is {}, more than any batch has", name, **number);
  if (!all && !micro)
    return "neither 'train_batch_size' nor 'train_micro_batch_size_per_gpu' is there, expected at least one; write the "
           "samples of a rank's batch as train_micro_batch_size_per_gpu";
  if (all && micro && !steps) steps = share(*all, *micro * ranks);
  else if (all && !micro && steps) micro = share(*all, *steps * ranks);
  else if (all && !micro) steps = 1, micro = share(*all, ranks);
  else if (!all) steps = steps.value_or(1), all = *micro * *steps * ranks;
  if (*micro > 0 && *steps > 0 && *all == *micro * *steps * ranks) return "";
  // The number that was given together with others, and does not go with them.
  if (given.train_batch_size && given.train_micro_batch_size_per_gpu && given.gradient_accumulation_steps)
    return fmt::format(
        "'train_batch_size' is {}, but train_micro_batch_size_per_gpu {} x gradient_accumulation_steps {} "
        "x {} ranks are {}; correct one of the three, or leave one out",
        *all, *micro, *steps, ranks, *micro * *steps * ranks);
  const char* smallest = given.train_micro_batch_size_per_gpu ? "train_micro_batch_size_per_gpu times the ranks"
                         : given.gradient_accumulation_steps  ? "gradient_accumulation_steps times the ranks"
                                                              : "the ranks";
  return fmt::format(
      "'train_batch_size' is {}, which is no multiple of {}: train_batch_size {} = train_micro_batch_size_per_gpu {} x "
      "gradient_accumulation_steps {} x {} ranks does not hold (0: 'train_batch_size' is too small for "
      "'train_micro_batch_size_per_gpu' or 'gradient_accumulation_steps'); correct it",
      *all, smallest, *all, *micro, *steps, ranks);
}

}  // namespace accelerate::zero
