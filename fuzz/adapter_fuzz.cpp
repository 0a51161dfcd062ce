#include <cstdlib>

#include "accelerate/utils/error.hpp"
#include "adapters/adapter_file.hpp"
#include "scratch_folder.hpp"

// Any bytes are an adapter_config.json and an adapter_model.safetensors with whole pairs of the rank that the first one
// says, whose configuration can be written and reads the same; or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::detail;
  static const ScratchFolder folder;
  const auto files = files_of(data, size);
  folder.write("adapter_config.json", files[0]);
  const auto tensors = data + files[0].size() + 1;  // may have that byte, too
  folder.write("adapter_model.safetensors",
               files.size() == 1 ? std::string_view()
                                 : std::string_view(reinterpret_cast<const char*>(tensors), data + size - tensors));
  try {
    const auto again = [](const LoraConfig& config) {
      return read_config(folder.write("again.json", to_json(config, config.fan_in_fan_out)));
    };
    const auto loaded = read_config(folder.path() / "adapter_config.json");
    if (!loaded.whole_names) {
      const auto text = to_json(loaded.config, false);
      if (to_json(again(loaded.config).config, false) != text) std::abort();
    }
    for (const auto& [path, pair] : read_adapter(folder.path()).pairs) {
      const int64_t rank = rank_of(loaded.config, path);
      if (path.empty() || pair.first.size(0) != rank || pair.second.size(1) != rank) std::abort();
      alpha_of(loaded.config, path);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
