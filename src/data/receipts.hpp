#pragma once

#include <optional>
#include <vector>

#include "accelerate/data/prepared.hpp"
#include "observe/receipt_rows.hpp"

namespace accelerate::receipts {

struct LoadingFacts {
  RunFacts run = {};
  data::PrepareDataLoaderOptions given;           ///< as the program gave them
  std::optional<bool> split_batches;              ///< given by its short name
  DataLoaderConfiguration loading;                ///< that holds
  int64_t checkpoints = 0, loader_positions = 0;  ///< that were saved
};
std::vector<Receipt> of_loading(const LoadingFacts& facts);

}  // namespace accelerate::receipts
