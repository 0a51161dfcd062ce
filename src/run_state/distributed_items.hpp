#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "formats/dcp.hpp"
#include "run_state/holdings.hpp"

namespace accelerate::run_state {

/// What one rank writes into a distributed checkpoint; names and paths on all ranks alike.
class DistributedItems {
 public:
  void object(const formats::DcpPath& path, const c10::IValue& value);
  /// The same on all ranks.
  void whole(const formats::DcpPath& path, const at::Tensor& tensor);
  /// `values` lie in pieces as the holding does.
  void piece(const formats::DcpPath& path, const parallel::Holding& holding, const at::Tensor& values);

  /// The folder appears when it is complete; one that was there is replaced then. Collective.
  void write(const std::filesystem::path& folder) const;

 private:
  std::string name(const formats::DcpPath& path);

  std::vector<formats::DcpObjectItem> objects_;
  std::vector<formats::DcpTensorItem> tensors_;
  std::map<std::string, formats::DcpPath> paths_;
};

}  // namespace accelerate::run_state
