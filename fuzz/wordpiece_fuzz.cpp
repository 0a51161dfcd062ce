#include <cstdlib>
#include <string>

#include "accelerate/models/wordpiece.hpp"
#include "accelerate/utils/error.hpp"
#include "scratch_folder.hpp"

// Any bytes are a vocabulary that cuts text into its own tokens, or a CheckpointError. vocab.txt, and behind an 0xFF
// tokenizer_config.json; a text comes behind another one.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  auto files = files_of(data, size);
  files.resize(3);
  folder.write("vocab.txt", files[0]);
  folder.write("tokenizer_config.json", files[1].empty() ? "{}" : files[1]);
  try {
    const auto tokenizer = models::WordPieceTokenizer::from_pretrained(folder.path());
    for (const std::string& text :
         {std::string(files[2]), std::string("Un\xc3\xa9 caf\xc3\xa9, [MASK]b\xe4\xbd\xa0\xff aaab")}) {
      const auto encoding = tokenizer.encode(text);
      for (const auto id : encoding.input_ids)
        if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
      tokenizer.decode(encoding.input_ids);
    }
  } catch (const CheckpointError&) {
  }
  return 0;
}
