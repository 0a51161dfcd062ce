#pragma once

/// The modules of a model and the places of its tensors: Accelerator::summary() and print_summary().

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A parameter or buffer. Weights that are tied are one tensor.
struct TensorSummary {
  std::string name;                    ///< the first, as in the model's state
  std::vector<std::string> tied = {};  ///< its other names
  std::vector<int64_t> shape = {};
  /// In which it is kept; a sharded model may compute in another one.
  at::ScalarType dtype = at::kFloat;
  bool parameter = true;  ///< not a buffer
  bool trainable = false;
  /// - "cpu", "cuda:0", ...: in this device's memory
  /// - "sharded": each rank keeps a shard; "sharded, on the host" if it is brought to the device for use
  /// - "host": in host memory, and brought to a device for use
  /// - "file": in a file, which is mapped, or read for use
  /// - "nf4 codes" and so on: in few bits, in host memory, and decoded or not for use; "nf4 codes, file": mapped
  /// - "deferred": nowhere yet, see init_empty_weights(); "meta": nowhere
  std::string place;
  int64_t numel = 0;
  int64_t bytes = 0;       ///< of the whole tensor
  int64_t bytes_here = 0;  ///< that this rank keeps of it in memory all the time
};

/// A module of the tree, at the first place at which it is registered. Numbers are of it with all modules within it,
/// each tensor once.
struct ModuleSummary {
  std::string path;        ///< as Python's named_modules() has it: "" is the model itself
  std::string class_name;  ///< without namespaces: "Linear"
  int64_t depth = 0;       ///< 0: the model itself
  /// Its own tensors, without those of modules within it, by what it calls them, and their place in `tensors`.
  std::vector<std::pair<std::string, size_t>> own = {};
  int64_t parameters = 0, trainable = 0;
  int64_t bytes = 0;       ///< parameters and buffers, whole
  int64_t bytes_here = 0;  ///< kept by this rank
  std::vector<at::ScalarType> dtypes = {};
  std::vector<std::string> places = {};
};

struct SummaryOptions {
  /// How far down the tree modules are listed; 0: the model alone. Deeper ones count in their parents.
  /// Unset: all modules.
  std::optional<int64_t> depth;
};

struct ModelSummary {
  std::vector<ModuleSummary> modules;  ///< never empty; a module comes before those within it
  std::vector<TensorSummary> tensors;
  /// By rank and place: bytes that are kept in memory all the time. A file's are not.
  std::vector<std::map<std::string, int64_t>> ranks;
  /// Ranks that hold the model together; 1 where each has all of it.
  int64_t shards = 1;

  /// For people: a line for each module, then totals, and what each rank keeps.
  ACCELERATE_API std::string text(const SummaryOptions& options = {}) const;
  /// The same for programs: one JSON object with "modules", "tensors" and "ranks".
  ACCELERATE_API std::string json() const;
};

}  // namespace accelerate
