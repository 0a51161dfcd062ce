#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "formats/dcp/item_index.hpp"
#include "formats/dcp/layout.hpp"
#include "formats/dcp/metadata.hpp"
#include "formats/input_file.hpp"

namespace accelerate::formats {

/// Where the items of a distributed checkpoint lie, whether `.metadata` lists them or a layout has rules for them. Safe
/// to use from several threads. Needs no LibTorch.
class DcpFolder {
 public:
  /// Reads what is written last, and no data file. @throws CheckpointError as read_dcp_metadata()
  explicit DcpFolder(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const DcpMetadata& metadata() const { return metadata_; }

  /// The saved parts that have elements of a box within a tensor, with their places. By a layout only the files of
  /// ranks that have such parts are opened. @param entry  one of metadata()'s, a tensor
  /// @throws CheckpointError where the index of a file is damaged, or lacks a part that the layout says is there
  std::vector<DcpChunk> parts_under(const DcpEntry& entry, const DcpBox& box) const;
  /// The place of an object. @throws CheckpointError likewise
  DcpLocation place_of(const DcpEntry& entry) const;

  struct HeldPart {
    const DcpEntry* entry;
    DcpChunk chunk;  ///< without a box of an object
  };
  /// All that a rank has by the layout; nothing of a rank without items, which has no file. @throws CheckpointError
  /// likewise, and for items that the layout does not know
  std::vector<HeldPart> parts_of_rank(int64_t rank) const;

  /// A data file. @throws CheckpointError if it is not there, or a link that leads out of the folder
  std::shared_ptr<const InputFile> file(const std::string& name) const;

 private:
  std::shared_ptr<const DcpItemIndex> index_of(int64_t rank) const;
  DcpLocation place(const DcpEntry& entry, int64_t rank, int64_t box_number) const;
  size_t number_of(const DcpEntry& entry) const { return static_cast<size_t>(&entry - metadata_.entries.data()); }

  std::filesystem::path folder_;
  DcpMetadata metadata_;
  mutable std::mutex mutex_;
  mutable std::map<std::string, std::shared_ptr<const InputFile>> files_;
  mutable std::map<int64_t, std::shared_ptr<const DcpItemIndex>> indexes_;  ///< of a layout's ranks
  mutable size_t indexed_items_ = 0;                                        ///< in them
};

}  // namespace accelerate::formats
