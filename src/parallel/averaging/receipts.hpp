#pragma once

#include <vector>

#include "accelerate/utils/kwargs.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

struct AveragingFacts {
  RunFacts run = {};
  DistributedDataParallelKwargs given = {};
  bool sharded = false;  ///< models are (FSDP)
};
std::vector<Receipt> of_averaging(const AveragingFacts& facts);

}  // namespace accelerate::receipts
