#include "formats/gguf_names.hpp"

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>

#include "formats/gguf_fields.hpp"
#include "formats/weight_names.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

/// Far more than models have. Each has a name, also those of a tensor without bytes, of which a file can say anything.
constexpr int64_t kMostExperts = 65536;

enum class Change { none, query, key, transposed, experts };

struct NameRule {
  const char* gguf;          ///< "blk.#." stands for the layer's prefix; endings ".weight" and ".bias" are kept.
  const char* hugging_face;  ///< "#" is the layer, "@" the expert.
  Change change = Change::none;
};

/// Rotary projections are stored in the order of rows that llama.cpp's kernels want.
constexpr NameRule kLlama[] = {
    {"token_embd", "model.embed_tokens"},
    {"output_norm", "model.norm"},
    {"output", "lm_head"},
    {"blk.#.attn_norm", "model.layers.#.input_layernorm"},
    {"blk.#.ffn_norm", "model.layers.#.post_attention_layernorm"},
    {"blk.#.attn_q", "model.layers.#.self_attn.q_proj", Change::query},
    {"blk.#.attn_k", "model.layers.#.self_attn.k_proj", Change::key},
    {"blk.#.attn_v", "model.layers.#.self_attn.v_proj"},
    {"blk.#.attn_output", "model.layers.#.self_attn.o_proj"},
    {"blk.#.ffn_gate", "model.layers.#.mlp.gate_proj"},
    {"blk.#.ffn_up", "model.layers.#.mlp.up_proj"},
    {"blk.#.ffn_down", "model.layers.#.mlp.down_proj"},
    {"blk.#.ffn_gate_inp", "model.layers.#.block_sparse_moe.gate"},
    {"blk.#.ffn_gate_exps", "model.layers.#.block_sparse_moe.experts.@.w1", Change::experts},
    {"blk.#.ffn_down_exps", "model.layers.#.block_sparse_moe.experts.@.w2", Change::experts},
    {"blk.#.ffn_up_exps", "model.layers.#.block_sparse_moe.experts.@.w3", Change::experts},
};

/// Its linear layers are Conv1D, [in, out].
constexpr NameRule kGpt2[] = {
    {"token_embd", "transformer.wte"},
    {"position_embd", "transformer.wpe"},
    {"output_norm", "transformer.ln_f"},
    {"output", "lm_head"},
    {"blk.#.attn_norm", "transformer.h.#.ln_1"},
    {"blk.#.ffn_norm", "transformer.h.#.ln_2"},
    {"blk.#.attn_qkv", "transformer.h.#.attn.c_attn", Change::transposed},
    {"blk.#.attn_output", "transformer.h.#.attn.c_proj", Change::transposed},
    {"blk.#.ffn_up", "transformer.h.#.mlp.c_fc", Change::transposed},
    {"blk.#.ffn_down", "transformer.h.#.mlp.c_proj", Change::transposed},
};

std::map<std::string, NameRule> rules_of(const std::string& architecture) {
  std::map<std::string, NameRule> rules;
  if (architecture == "llama" || architecture == "qwen2")
    for (auto rule : kLlama) {
      if (architecture == "qwen2") rule.change = Change::none;
      rules.emplace(rule.gguf, rule);
    }
  if (architecture == "gpt2")
    for (const auto& rule : kGpt2) rules.emplace(rule.gguf, rule);
  return rules;
}

void replace(std::string& text, char mark, const std::string& by) {
  if (const auto at = text.find(mark); at != std::string::npos) text.replace(at, 1, by);
}

/// A name of Hugging Face's, with "#" and "@" for its first and second number.
struct NamePattern {
  std::string stem, ending;  ///< the ending with its dot
  std::vector<int64_t> numbers;
};

NamePattern pattern_of(const std::string& name) {
  NamePattern pattern;
  const auto dot = std::min(name.rfind('.'), name.size());
  pattern.ending = name.substr(dot);
  for (size_t begin = 0; begin < dot;) {
    const size_t end = std::min(name.find('.', begin), dot);
    const auto part = name.substr(begin, end - begin);
    constexpr size_t kMostDigits = 9;  // of layers and experts
    const bool number = !part.empty() && part.size() <= kMostDigits && pattern.numbers.size() < 2 &&
                        std::ranges::all_of(part, [](unsigned char c) { return std::isdigit(c); });
    if (!pattern.stem.empty()) pattern.stem += '.';
    pattern.stem += number ? pattern.numbers.empty() ? "#" : "@" : part;
    if (number) pattern.numbers.push_back(std::stoll(part));
    begin = end + 1;
  }
  return pattern;
}

/// Whether the rows of each head come in pairs. Both are numbers of a file, so that their product may be none.
bool has_pairs_of_rows(const std::vector<int64_t>& shape, int64_t heads) {
  return heads >= 1 && (shape.size() == 1 || shape.size() == 2) && shape[0] >= heads && shape[0] % heads == 0 &&
         shape[0] / heads % 2 == 0;
}

/// Whether a model of this form has the weight.
bool is_needed(const NameRule& rule, const GgufForm& form) {
  const std::string_view name = rule.gguf;
  if (name == "output") return !form.tied;
  const bool of_experts = name.find("_exps") != name.npos || name.find("_inp") != name.npos;
  if (of_experts) return form.experts > 0;
  return form.experts == 0 || !name.starts_with("blk.#.ffn_") || name.ends_with("_norm");
}

}  // namespace

std::vector<GgufTarget> gguf_tensors(const GgufForm& form, const std::map<std::string, std::vector<int64_t>>& shapes,
                                     const std::string& source) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("'{}': {}", source, fmt::format(what, std::forward<Args>(args)...));
  };
  const auto rules = rules_of(form.architecture);
  std::map<std::string, const NameRule*> by_name;
  std::string body;  // what comes before the names of a model without a head
  for (const auto& [name, rule] : rules) {
    by_name.emplace(rule.hugging_face, &rule);
    if (name == "token_embd") body = std::string(rule.hugging_face, std::string_view(rule.hugging_face).find('.') + 1);
  }
  std::map<std::string, GgufTarget> targets;
  for (const auto& [name, shape] : shapes) {
    if (is_worked_out(name) || (form.tied && name == "lm_head.weight")) continue;
    const auto pattern = pattern_of(name);
    auto found = by_name.find(pattern.stem);
    if (found == by_name.end()) found = by_name.find(body + pattern.stem);
    if (found == by_name.end() || (pattern.ending != ".weight" && pattern.ending != ".bias") ||
        std::ranges::count_if(pattern.stem, [](char c) { return c == '#' || c == '@'; }) !=
            static_cast<std::ptrdiff_t>(pattern.numbers.size()))
      fail(
          "the tensor '{}' has no name in a .gguf file of the architecture {}, so that it would be lost. Is it of a "
          "model with another head, or with adapters?",
          name, form.architecture);
    const auto& rule = *found->second;
    auto stored = rule.gguf + pattern.ending;
    if (!pattern.numbers.empty()) {
      if (pattern.numbers[0] >= form.layers)
        fail("the tensor '{}' is of layer {}, and config.json says that there are {}.", name, pattern.numbers[0],
             form.layers);
      replace(stored, '#', std::to_string(pattern.numbers[0]));
    }
    auto& target = targets[stored];
    target.name = stored;
    if (rule.change != Change::experts) {
      if (!target.parts.empty()) fail("'{}' and '{}' are the same tensor.", target.parts[0], name);
      target.parts = {name};
      target.shape = shape;
      target.transposed = rule.change == Change::transposed && shape.size() == 2;
      if (target.transposed) std::swap(target.shape[0], target.shape[1]);
      if (rule.change != Change::query && rule.change != Change::key) continue;
      target.rotary_heads = rule.change == Change::query ? form.heads : form.key_value_heads;
      if (!has_pairs_of_rows(shape, target.rotary_heads))
        fail("'{}' has the shape [{}], expected an even number of rows for each of the {} heads.", name,
             fmt::join(shape, ", "), target.rotary_heads);
      continue;
    }
    const auto expert = static_cast<size_t>(pattern.numbers[1]);
    if (expert >= static_cast<size_t>(form.experts))
      fail("the tensor '{}' is of expert {}, and config.json says that there are {}.", name, expert, form.experts);
    if (target.parts.empty()) {
      target.parts.resize(static_cast<size_t>(form.experts));
      target.shape = shape;
      target.shape.insert(target.shape.begin(), form.experts);
    } else if (!std::equal(shape.begin(), shape.end(), target.shape.begin() + 1, target.shape.end())) {
      fail("'{}' has the shape [{}], other than the experts before it.", name, fmt::join(shape, ", "));
    }
    target.parts[expert] = name;
  }
  std::vector<GgufTarget> result;
  for (const auto& [gguf, rule] : rules) {
    if (!is_needed(rule, form)) continue;
    const bool of_layers = gguf.find('#') != std::string::npos;
    for (int64_t layer = 0; layer < (of_layers ? form.layers : 1); ++layer) {
      auto stored = gguf;
      replace(stored, '#', std::to_string(layer));
      for (const char* ending : {".weight", ".bias"}) {
        const auto target = targets.find(stored + ending);
        if (target == targets.end()) {
          if (ending == std::string_view(".bias")) continue;
          auto missing = rule.hugging_face + std::string(ending);
          replace(missing, '#', std::to_string(layer));
          fail("it lacks the tensor '{}', which config.json asks for. Is the checkpoint whole?", missing);
        }
        for (size_t expert = 0; expert < target->second.parts.size(); ++expert)
          if (target->second.parts[expert].empty())
            fail("it lacks '{}' of expert {} in layer {}. Is the checkpoint whole?", rule.hugging_face, expert, layer);
        result.push_back(std::move(target->second));
        targets.erase(target);
      }
    }
  }
  if (!targets.empty())
    fail("it has the tensor '{}', which a model of its config.json has not.", targets.begin()->second.parts.back());
  return result;
}

std::vector<std::pair<std::string, GgufSource>> hugging_face_tensors(const GgufHeader& header,
                                                                     const std::string& file) {
  const GgufFields fields(header, file);
  const auto rules = rules_of(fields.architecture());
  std::vector<std::pair<std::string, GgufSource>> result;
  for (size_t index = 0; index < header.tensors.size(); ++index) {
    const auto& stored = header.tensors[index];
    GgufSource source{.tensor = index, .shape = stored.shape};
    // blk.12.attn_q.weight: layer 12, rule blk.#.attn_q, ending .weight
    const auto dot = stored.name.rfind('.');
    std::string stem = stored.name.substr(0, dot), layer;
    const std::string ending = dot == std::string::npos ? "" : stored.name.substr(dot);
    if (stem.starts_with("blk.")) {
      const auto begin = std::string_view("blk.").size(), end = stem.find('.', begin);
      if (end != std::string::npos && end > begin &&
          std::all_of(stem.begin() + static_cast<std::ptrdiff_t>(begin),
                      stem.begin() + static_cast<std::ptrdiff_t>(end),
                      [](unsigned char c) { return std::isdigit(c); })) {
        layer = stem.substr(begin, end - begin);
        stem.replace(begin, end - begin, "#");
      }
    }
    const auto rule = rules.find(stem);
    if (rule == rules.end() || (ending != ".weight" && ending != ".bias")) {
      result.emplace_back(stored.name, std::move(source));
      continue;
    }
    std::string name = rule->second.hugging_face + ending;
    replace(name, '#', layer);
    const auto wrong_shape = [&](const std::string& expected) {
      fields.fail("tensor '{}' has {} dimensions, the first of {}, expected {}.", stored.name, stored.shape.size(),
                  stored.shape.empty() ? 1 : stored.shape[0], expected);
    };
    const bool matrix = stored.shape.size() == 2;
    switch (rule->second.change) {
      case Change::none:
        break;
      case Change::transposed:
        if (matrix) {
          std::swap(source.shape[0], source.shape[1]);
          source.transposed = true;
        }
        break;
      case Change::query:
      case Change::key: {
        source.rotary_heads = rule->second.change == Change::query ? fields.heads() : fields.key_value_heads();
        if (!has_pairs_of_rows(stored.shape, source.rotary_heads))
          wrong_shape(fmt::format("an even number of rows for each of the {} heads", source.rotary_heads));
        break;
      }
      case Change::experts: {
        const auto experts = fields.need_integer("expert_count");
        if (stored.shape.size() != 3 || stored.shape[0] != experts)
          wrong_shape(fmt::format("three, the first of the {} experts", experts));
        if (experts > kMostExperts || std::ranges::find(stored.shape, 0) != stored.shape.end())
          fields.fail(
              "tensor '{}' has the shape [{}], expected 1 to {} experts with at least one element each. The file may "
              "be damaged; get it again.",
              stored.name, fmt::join(stored.shape, ", "), kMostExperts);
        source.shape.erase(source.shape.begin());
        for (int64_t expert = 0; expert < experts; ++expert) {
          auto of_expert = name;
          replace(of_expert, '@', std::to_string(expert));
          source.first_row = expert * source.shape[0];
          result.emplace_back(std::move(of_expert), source);
        }
        continue;
      }
    }
    result.emplace_back(std::move(name), std::move(source));
  }
  return result;
}

}  // namespace accelerate::formats
