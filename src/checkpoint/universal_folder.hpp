#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/archive.hpp"
#include "checkpoint/saved_state.hpp"

namespace accelerate::checkpointing {

using Sizes = std::map<std::string, std::vector<int64_t>>;  ///< of parameters by name

/// The folder `zero` of a universal checkpoint: each trained parameter whole, as fp32.pt beside a file for each of its
/// states (exp_avg.pt, …, step.pt) in a folder of its name, and optimizer_state.pt with what all have in common. Files
/// are opened when they are asked for and closed again: there are thousands. Source: DeepSpeed 0.19.8, ds_to_universal,
/// universal_checkpoint.
class UniversalFolder {
 public:
  static constexpr const char* kFolder = "zero";
  static constexpr const char* kMasters = "fp32";
  static constexpr const char* kStep = "step";

  /// Whether a tag's folder is of this kind.
  static bool is_one(const std::filesystem::path& folder);
  /// @param folder  of the tag. @throws CheckpointError naming what is missing or damaged, as all members
  explicit UniversalFolder(const std::filesystem::path& folder);

  /// optimizer_state.pt.
  const Archive& common() const { return *common_; }
  /// A master or a state. @param sizes  that the parameter has where it goes; null: unknown. The tensor gets them where
  /// only the view differs (stage 3's are flat) or, in a vocabulary, whose padding these files leave out, the number
  /// of rows: those are zeros. Where more differs it keeps the file's.
  StoredTensor tensor(const std::string& parameter, const std::string& kind, const std::vector<int64_t>* sizes) const;
  /// Names of a parameter's states, without "step"; in order.
  std::vector<std::string> kinds(const std::string& parameter) const;
  /// A number, or a tensor of one; None without.
  c10::IValue step(const std::string& parameter) const;

 private:
  std::filesystem::path folder_of(const std::string& parameter) const;

  std::filesystem::path folder_;
  std::shared_ptr<const Archive> common_;
};

}  // namespace accelerate::checkpointing
