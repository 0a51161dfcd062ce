#include <cstdlib>
#include <string>
#include <vector>

#include "accelerate/utils/error.hpp"
#include "formats/gguf_header.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "scratch_folder.hpp"

// Any bytes are a tokenizer.json, a tokenizer_config.json and a chat template whose vocabulary a GGUF file can hold and
// gives back, or an error of ours.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  const auto files = files_of(data, size);
  const char* const names[] = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"};
  for (size_t i = 0; i < 3; ++i) {
    folder.remove(names[i]);
    if (i < files.size()) folder.write(names[i], files[i]);
  }
  try {
    std::vector<std::string> notes;
    const auto entries = formats::gguf_vocabulary(folder.path(), {{"eos_token_id", 3}}, 512, notes);
    std::string header("GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16);
    const uint64_t count = entries.size();
    header.append(reinterpret_cast<const char*>(&count), sizeof count);
    for (const auto& entry : entries) header += entry;
    const auto read = formats::parse_gguf_header(header, "fuzz");
    if (formats::tokenizer_files(read.metadata, "fuzz").empty()) std::abort();
  } catch (const CheckpointError&) {
  } catch (const ConfigError&) {
  }
  return 0;
}
