#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace cli_test {

struct TinyModel {
  bool has_copy = false;   ///< a head beside the embeddings that it is tied to
  bool is_broken = false;  ///< a norm is NaN
};

/// A folder with a LLaMA of one layer and a vocabulary of letters.
inline void write_tiny_model(const std::filesystem::path& folder, const TinyModel& model = {}) {
  std::filesystem::create_directories(folder);
  std::ofstream(folder / "config.json")
      << R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 26, "hidden_size": 64,
             "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
             "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true,
             "bos_token_id": null, "eos_token_id": null})";
  nlohmann::json vocab;
  for (char c = 'a'; c <= 'z'; ++c) vocab[std::string(1, c)] = c - 'a';
  std::ofstream(folder / "tokenizer.json")
      << nlohmann::json{{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}},
                        {"added_tokens", nlohmann::json::array()},
                        {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
                        {"decoder", {{"type", "ByteLevel"}}}};
  std::map<std::string, std::vector<int64_t>> shapes{{"model.embed_tokens.weight", {26, 64}},
                                                     {"model.norm.weight", {64}}};
  const std::string layer = "model.layers.0.";
  for (const char* name : {"input_layernorm", "post_attention_layernorm"}) shapes[layer + name + ".weight"] = {64};
  for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                           "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
    shapes[layer + name + ".weight"] = {64, 64};
  if (model.has_copy) shapes["lm_head.weight"] = {26, 64};
  nlohmann::json header;
  std::vector<float> values;
  for (const auto& [name, shape] : shapes) {
    const size_t begin = values.size(), count = static_cast<size_t>(shape[0] * (shape.size() > 1 ? shape[1] : 1));
    for (size_t i = 0; i < count; ++i)
      values.push_back(shape.size() == 1 ? 1.0F : 0.3F * std::sin(static_cast<float>(i * i % 1009)));
    if (model.is_broken && name == "model.norm.weight") values.back() = std::numeric_limits<float>::quiet_NaN();
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {4 * begin, 4 * values.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  std::ofstream file(folder / "model.safetensors", std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size)) << text;
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(4 * values.size()));
}

}  // namespace cli_test
