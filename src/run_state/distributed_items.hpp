#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "formats/dcp.hpp"
#include "run_state/state_dict.hpp"

namespace accelerate::snapshot {
class PutOff;
}

namespace accelerate::run_state {

/// The items of a state dict that this rank writes into a distributed checkpoint. The first rank writes values that
/// several ranks have alike, but for the parts of tensors, which replicas share out; a rank may have values of its own.
class DistributedItems {
 public:
  /// The dict's tensors are read when they are written. Collective.
  /// @throws CheckpointError on all ranks, naming the values of which ranks have tensors of different sizes or dtypes;
  /// ConfigError as leaves_of().
  explicit DistributedItems(const StateDict& state);

  /// Into a folder that is there, without a distributed checkpoint in it. Collective. @throws on all ranks.
  void write_into(const std::filesystem::path& folder) const;
  /// Into a folder that is made for it, within a checkpoint that appears when all of it is complete. Collective.
  void write(const std::filesystem::path& folder) const;

 private:
  /// @param writer  the replica that writes a tensor of which this rank has parts
  void add(const Leaf& leaf, bool first, int64_t writer);
  void write_later(const std::filesystem::path& folder, snapshot::PutOff& later) const;

  std::vector<formats::DcpObjectItem> objects_;
  std::vector<formats::DcpTensorItem> tensors_;
  std::map<std::string, formats::DcpPath> paths_;  ///< of all ranks
  /// Not null: all ranks know by rules who has what, and no rank has to tell of its parts.
  std::shared_ptr<const formats::DcpLayout> layout_;
};

}  // namespace accelerate::run_state
