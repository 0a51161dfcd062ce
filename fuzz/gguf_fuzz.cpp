#include <cstdlib>
#include <string_view>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "formats/gguf_config.hpp"
#include "formats/gguf_names.hpp"
#include "formats/gguf_vocabulary.hpp"

// Any bytes are a file whose tensors lie within it and can be decoded, or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::formats;
  try {
    const auto header = parse_gguf_header({reinterpret_cast<const char*>(data), size}, "fuzz");
    const auto shorter = parse_gguf_header({reinterpret_cast<const char*>(data), size}, "fuzz", GgufLists::short_ones);
    if (shorter.entries.size() != header.entries.size() || shorter.tensors.size() != header.tensors.size())
      std::abort();
    for (const auto& entry : header.entries)
      if (shorter.metadata.contains(entry.key) == (entry.elements > kMostInShortList)) std::abort();
    check_gguf_data(header, static_cast<int64_t>(size), "fuzz");
    for (const auto& tensor : header.tensors) {
      if (tensor.begin < 0 || tensor.bytes < 0 || static_cast<uint64_t>(tensor.begin + tensor.bytes) > size)
        std::abort();
      const auto& encoding = *tensor.encoding;
      const int64_t blocks = tensor.bytes / encoding.block_bytes;
      if (!encoding.decode || blocks * encoding.block > 1 << 20) continue;
      std::vector<float> numbers(static_cast<size_t>(blocks * encoding.block));
      encoding.decode(data + tensor.begin, blocks, numbers.data());
    }
    for (const auto& [name, source] : hugging_face_tensors(header, "fuzz"))
      if (source.tensor >= header.tensors.size() || source.first_row < 0) std::abort();
    tokenizer_files(header.metadata, "fuzz");
    gguf_config_json(header, "fuzz", nullptr);
  } catch (const CheckpointError&) {
  }
  return 0;
}
