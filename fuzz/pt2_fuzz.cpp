#include <cstdlib>
#include <string>

#include "accelerate/utils/error.hpp"
#include "formats/pt2_weights.hpp"
#include "formats/torch_container.hpp"
#include "stored_zip.hpp"

// Any bytes are a program of torch.export whose weights lie within the file, or a CheckpointError. A zip is taken as it
// is; other inputs are the list of weights in one: changes seldom leave a zip intact.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::formats;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  if (!bytes.starts_with("PK"))
    bytes = support::stored_zip({{"m/archive_format", "pt2"},
                                 {"m/data/weights/model_weights_config.json", bytes},
                                 {"m/data/weights/weight_0", std::string(64, '\1')},
                                 {"m/data/weights/weight_1", ""}});
  try {
    const auto file = std::make_shared<const InputFile>("fuzz", std::move(bytes));
    const ZipArchive archive(file, 0, file->size(), "fuzz");
    if (!is_pt2(archive)) return 0;
    for (const auto& [name, entry] : archive.entries())
      if (entry.stored) archive.check(name);
    for (const auto& weight : read_pt2_weights(archive, "fuzz").weights) {
      const auto width = torch_element_bytes(weight.dtype);
      if (width == 0 || weight.sizes.size() != weight.strides.size() || weight.first < 0) std::abort();
      if (weight.numel > 0 && (weight.last + 1) * width > weight.bytes.size) std::abort();
      if (weight.bytes.begin < 0 || weight.bytes.size > file->size() - weight.bytes.begin) std::abort();
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
