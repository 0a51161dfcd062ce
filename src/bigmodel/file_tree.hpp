#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "accelerate/bigmodel/sizes.hpp"

namespace accelerate::bigmodel {

/// A model as its files describe it. They may be damaged, or made so that few bytes describe endlessly much; hence the
/// limits.
class FileTree {
 public:
  static constexpr int kDeepest = 100;  ///< modules within modules; whoever walks through the tree does so recursively
  static constexpr int64_t kMostEntries = 1'000'000;  ///< the largest models have some hundred thousand
  /// The bytes of all dotted names together: a file can make much of little by names within names.
  static constexpr size_t kMostNameBytes = size_t{64} << 20;

  /// @param source  begins the messages
  explicit FileTree(std::string source) : source_(std::move(source)) {}

  ModuleTree& root() { return root_; }
  /// A number that no tensor has had yet, in any of the model's files.
  int64_t new_identity() { return ++identities_; }
  /// Adds a tensor where its dotted name says. @throws CheckpointError if that is nested too deep, or as count().
  void add(const std::string& name, TensorSpec tensor);
  /// To be called before anything is added or looked at, with the length of its dotted name. @throws CheckpointError
  /// for too many.
  void count(size_t name_bytes);

 private:
  std::string source_;
  ModuleTree root_;
  std::unordered_map<std::string, size_t> place_;  ///< by dotted name: which child of its parent a module is
  int64_t identities_ = 0;
  int64_t entries_ = 0;
  size_t name_bytes_ = 0;
};

}  // namespace accelerate::bigmodel
