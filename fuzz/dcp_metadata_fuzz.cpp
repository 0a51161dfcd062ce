#include <cstdlib>

#include "accelerate/utils/error.hpp"
#include "formats/dcp/metadata.hpp"

// Any bytes are metadata of which the properties below hold, or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::formats;
  try {
    const auto metadata = parse_dcp_metadata({reinterpret_cast<const char*>(data), size}, "fuzz");
    for (const auto& entry : metadata.entries) {
      const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
      if (!info) continue;
      if (!checked_numel(info->sizes)) std::abort();
      int64_t covered = 0;
      for (const auto& chunk : info->chunks) {
        if (!lies_within(chunk.box, info->sizes)) std::abort();
        covered += *checked_numel(chunk.box.sizes);
      }
      if (covered > *checked_numel(info->sizes)) std::abort();  // parts don't overlap
    }
    // A parsed text can be written, and reads the same.
    const auto again = format_dcp_metadata(metadata);
    if (format_dcp_metadata(parse_dcp_metadata(again, "again")) != again) std::abort();
  } catch (const CheckpointError&) {
  }
  return 0;
}
