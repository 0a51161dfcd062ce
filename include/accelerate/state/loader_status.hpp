#pragma once

#include <cstdint>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// The status that the loader being iterated gives to the rest of the library. Implemented by prepared loaders.
class ACCELERATE_API LoaderStatus {
 public:
  virtual ~LoaderStatus() = default;
  /// The batch being held is the last one.
  virtual bool end_of_dataloader() const = 0;
  /// Samples in the last global batch that are not repetitions; -1 when unknown or none.
  virtual int64_t remainder() const = 0;
  /// Rows of the global batch being held that are not repetitions, which come last; 0: all of them.
  virtual int64_t own_rows() const { return end_of_dataloader() && remainder() > 0 ? remainder() : 0; }
};

}  // namespace accelerate
