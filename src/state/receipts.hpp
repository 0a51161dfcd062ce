#pragma once

#include <string>
#include <vector>

#include "accelerate/utils/kwargs.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

struct ProcessGroupFacts {
  RunFacts run = {};
  InitProcessGroupKwargs given = {};
  std::string backend = {};  ///< that ranks talk through
};
std::vector<Receipt> of_process_group(const ProcessGroupFacts& facts);

}  // namespace accelerate::receipts
