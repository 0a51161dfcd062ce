#include "accelerate/data/batch_ops.hpp"

#include <algorithm>

#include "utils/raise.hpp"

namespace accelerate::data::detail {

AnyBatch BatchOps::concat(const std::vector<AnyBatch>& batches) const {
  std::vector<const AnyBatch*> pointers;
  for (const AnyBatch& batch : batches) pointers.push_back(&batch);
  return concat(pointers);
}

AnyBatch BatchOps::complete(const AnyBatch& batch, const AnyBatch& from, int64_t rows) const {
  std::vector<AnyBatch> repetitions;
  int64_t missing = rows - this->rows(batch);
  const int64_t available = this->rows(from);
  while (missing > 0 && available > 0) {
    const int64_t take = std::min(missing, available);
    repetitions.push_back(slice(from, 0, take, available));
    missing -= take;
  }
  std::vector<const AnyBatch*> parts{&batch};
  for (const AnyBatch& repetition : repetitions) parts.push_back(&repetition);
  return concat(parts);
}

void throw_not_archivable() {
  raise<ConfigError>(
      "prepare_data_loader: batches are to be sent between ranks, but their type can't be written to bytes, expected "
      "numbers, strings, tensors, standard containers of them or structs with ACCELERATE_FIELDS; declare the fields, "
      "or set dispatch_batches = false and even_batches = false");
}

void throw_structures_differ(size_t first_tensors, size_t other_tensors) {
  raise<ShapeError>(
      "DataLoader: found batches of {} and of {} tensors, expected one structure in all batches to join them",
      first_tensors, other_tensors);
}

}  // namespace accelerate::data::detail
