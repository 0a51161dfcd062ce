#include <cstdlib>
#include <string>

#include "accelerate/utils/error.hpp"
#include "formats/index_file.hpp"
#include "input/json.hpp"
#include "scratch_folder.hpp"

// Any bytes are an index whose files are in its folder, or a CheckpointError; and what was read can be written, and
// reads the same.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  const auto path = folder.write("model.safetensors.index.json", {reinterpret_cast<const char*>(data), size});
  try {
    const auto files = formats::read_index(path);
    for (const auto& [tensor, name] : files)
      if ((folder.path() / name).parent_path() != folder.path() || name == ".." || name.find('\0') != name.npos)
        std::abort();
    folder.write("again.index.json", nlohmann::json{{"weight_map", files}}.dump());
    if (formats::read_index(folder.path() / "again.index.json") != files) std::abort();
  } catch (const CheckpointError&) {
  }
  return 0;
}
