#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "run_state/holdings.hpp"

namespace accelerate::run_state {

/// Tensors that get their values from files, where they are: some MB are all the memory that it takes.
class Filling {
 public:
  /// @param name  of the file or folder, for traces
  explicit Filling(std::string name) : name_(std::move(name)) {}

  /// @param what  for messages: "tensor '0.weight'"
  /// @param to    the slice that is held (it itself, a moment of Adam), of any dtype
  /// @throws CheckpointError if the file does not have all of it. Of elements nothing is read yet.
  void add(std::string what, const checkpointing::StoredTensor& stored, const parallel::Held& holding, at::Tensor to);
  /// Reads them, in the order of the disk. Not collective. @throws CheckpointError, having filled some of them
  void run() const;

 private:
  struct Item {
    std::string what;
    parallel::Held holding;
    at::Tensor to;
    std::vector<formats::FoundPart> parts;  ///< as boxes_of()
  };
  /// @param read  the tensor itself, or memory for it, from which it gets the values
  static void fill(const Item& item, const at::Tensor& read);

  std::string name_;
  std::vector<Item> items_;
};

}  // namespace accelerate::run_state
