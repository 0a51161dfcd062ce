#pragma once

#include <optional>
#include <vector>

#include "accelerate/state.hpp"
#include "observe/receipt_rows.hpp"
#include "precision/chosen_fp8.hpp"

namespace accelerate::receipts {

struct AutocastFacts {
  RunFacts run = {};
  AutocastKwargs given = {};
  PrecisionType precision = PrecisionType::NO;
  bool sharded = false;  ///< models are (FSDP)
};
std::vector<Receipt> of_autocast(const AutocastFacts& facts);

struct Fp8Facts {
  RunFacts run = {};
  FP8Settings given = {};
  ChosenFP8 chosen = {};
  PrecisionType precision = PrecisionType::NO;
  FP8Training::Counts counts;                ///< of all prepared models
  int64_t weights = 0;                       ///< theirs
  std::optional<int64_t> fsdp_version = {};  ///< nothing: models are not sharded
  int64_t parts_as_fp8 = 0;                  ///< of sharded models, whose weights travel so
  int64_t bytes_saved = 0;                   ///< of gradients, on the wire
};
std::vector<Receipt> of_fp8(const Fp8Facts& facts);

}  // namespace accelerate::receipts
