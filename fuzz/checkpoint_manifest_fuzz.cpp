#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "accelerate/utils/error.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "input/json.hpp"
#include "utils/raise.hpp"

namespace {

// A list of files below its folder, which can be written and reads the same; JSON of somebody else; or a
// CheckpointError.
void read(std::string_view text) {
  using namespace accelerate;
  try {
    const auto manifest = formats::parse_manifest(text, "input");
    if (!manifest) return;
    for (const auto& [name, sums] : manifest->files) {
      const std::filesystem::path path(name);
      if (name.empty() || path.is_absolute() || std::find(path.begin(), path.end(), "..") != path.end()) std::abort();
      if (static_cast<int64_t>(sums.parts.size()) != parts_of_bytes(sums.bytes, manifest->part_bytes)) std::abort();
    }
    if (formats::parse_manifest(formats::format_manifest(*manifest), "again") != manifest) std::abort();
  } catch (const CheckpointError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  read(text);
  // With the checksum that it should have, so that something is behind it.
  auto root = parse_json<nlohmann::json>(text);
  if (!root.is_object()) return 0;
  root.erase("crc32c");
  root["crc32c"] = fmt::format("{:08x}", crc32c::of(root.dump()));
  read(root.dump());
  return 0;
}
