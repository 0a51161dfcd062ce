#include <cstdlib>
#include <string>

#include "accelerate/models/tokenizer.hpp"
#include "accelerate/utils/error.hpp"
#include "scratch_folder.hpp"

// Any bytes are a tokenizer that cuts text into its own tokens, or an error of ours. One file or two: tokenizer.json
// and tokenizer_config.json; three: vocab.json, merges.txt and tokenizer_config.json.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  static const ScratchFolder folder;
  const auto files = files_of(data, size);
  const bool vocabulary = files.size() >= 3;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}) folder.remove(name);
  folder.write(vocabulary ? "vocab.json" : "tokenizer.json", files[0]);
  if (vocabulary) folder.write("merges.txt", files[1]);
  if (files.size() != 1) folder.write("tokenizer_config.json", files[vocabulary ? 2 : 1]);
  try {
    const auto tokenizer = models::Tokenizer::from_pretrained(folder.path());
    for (const std::string& text : {std::string("Hello, world's 123  \r\n\t<s>ab abab aabb"),
                                    std::string("\xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x99\x82 e\xcc\x81 \xc2\x85"),
                                    std::string("\xff\xfe\0a", 4), std::string(200, 'a') + std::string(200, ' ')})
      try {
        const auto ids = tokenizer.encode(text);
        for (const auto id : ids)
          if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
        const auto whole = tokenizer.decode(ids, /*skip_special_tokens=*/false);
        models::StreamDecoder stream(tokenizer, /*skip_special_tokens=*/false);
        std::string parts;
        for (const auto id : ids) parts += stream.push(id);
        if (parts + stream.finish() != whole) std::abort();
      } catch (const ResourceError&) {  // a pattern that takes too many steps
      }
    tokenizer.apply_chat_template({{"user", "x"}});
  } catch (const CheckpointError&) {
  }
  return 0;
}
