#include <cstdlib>
#include <utility>

#include "accelerate/utils/error.hpp"
#include "formats/safetensors_header.hpp"

// Any bytes are a header that passes, of which the properties below hold, or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const auto header = formats::parse_safetensors_header(bytes, static_cast<int64_t>(size), "fuzz");
    int64_t covered = 0;
    std::vector<std::pair<std::string, SafetensorsInfo>> tensors;
    for (const auto& name : header.names) {
      const auto& info = header.tensors.at(name);
      if (info.begin != covered || info.end < info.begin) std::abort();
      covered = info.end;
      tensors.emplace_back(name, info);
    }
    if (header.data_begin + covered != static_cast<int64_t>(size)) std::abort();
    // A parsed header can be written, and reads the same.
    const auto again = formats::format_safetensors_header(tensors, header.metadata, "fuzz");
    const auto second = formats::parse_safetensors_header(again, static_cast<int64_t>(again.size()) + covered, "fuzz");
    if (second.names != header.names || second.metadata != header.metadata) std::abort();
  } catch (const CheckpointError&) {
  }
  return 0;
}
