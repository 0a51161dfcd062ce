#include <cstdlib>
#include <string>

#include "accelerate/models/bert.hpp"
#include "accelerate/models/generate.hpp"
#include "accelerate/models/gpt2.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/utils/error.hpp"
#include "formats/gguf_config.hpp"
#include "input/json.hpp"
#include "models/bert_config.hpp"
#include "models/gpt2_config.hpp"
#include "models/llama_config.hpp"
#include "scratch_folder.hpp"

namespace {

using namespace accelerate;
const ScratchFolder& folder() {
  static const ScratchFolder scratch;
  return scratch;
}

/// A config that is read can be written, and reads the same.
template <class Config> void read(const char* architecture) {
  try {
    const auto config = Config::from_pretrained(folder().path());
    const auto text = to_json(config, architecture, "float32");
    folder().write("again.json", text);
    if (to_json(Config::from_pretrained(folder().path() / "again.json"), architecture, "float32") != text) std::abort();
  } catch (const CheckpointError&) {
  }
}

}  // namespace

// Any bytes are a config.json, and a generation_config.json, whose numbers a model can be built with, or a
// CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  for (const char* name : {"config.json", "generation_config.json"})
    folder().write(name, {reinterpret_cast<const char*>(data), size});
  read<models::LlamaConfig>("LlamaForCausalLM");
  read<models::GPT2Config>("GPT2LMHeadModel");
  read<models::BertConfig>("BertModel");
  try {
    models::GenerationConfig::from_pretrained(folder().path());
  } catch (const CheckpointError&) {
  }
  try {
    const auto config = parse_json<nlohmann::json>({reinterpret_cast<const char*>(data), size});
    if (config.is_object() && formats::gguf_model(config, "fuzz").form.layers < 1) std::abort();
  } catch (const CheckpointError&) {
  } catch (const ConfigError&) {
  }
  return 0;
}
