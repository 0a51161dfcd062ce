#include "models/weights.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>

#include "accelerate/formats/gguf.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "memory/huge_pages.hpp"
#include "models/json_file.hpp"
#include "models/refused_fields.hpp"
#include "state/deepspeed_plugins.hpp"
#include "utils/parallel.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

bool starts_with_any(const std::string& name, const std::vector<std::string>& prefixes) {
  return std::any_of(prefixes.begin(), prefixes.end(),
                     [&](const std::string& prefix) { return name.starts_with(prefix); });
}

bool ends_with_any(const std::string& name, const std::vector<std::string>& suffixes) {
  return std::any_of(suffixes.begin(), suffixes.end(),
                     [&](const std::string& suffix) { return name.ends_with(suffix); });
}

Tensors::const_iterator find(const Tensors& tensors, const std::string& name, const WeightRules& rules) {
  auto candidates = rules.names ? formats::names_in_files(*rules.names, name) : std::vector{name};
  if (rules.other_name) candidates.push_back(rules.other_name(name));
  for (const auto& candidate : candidates)
    if (const auto found = tensors.find(candidate); found != tensors.end()) return found;
  return tensors.end();
}

/// transformers believes the files where they have a head that is not the embeddings, whatever config.json says.
void check_tied(const Tensors& tensors, const WeightRules& rules, const std::string& source) {
  if (rules.tied_to.empty()) return;
  const auto words = find(tensors, rules.tied_to, rules);
  for (const char* name : {"lm_head.weight", "embed_out.weight"}) {
    const auto head = tensors.find(name);
    if (head == tensors.end() || words == tensors.end() || head->second.is_meta() || words->second.is_meta()) continue;
    if (head->second.sizes() != words->second.sizes() ||
        !at::equal(head->second, words->second.to(head->second.scalar_type())))
      raise<CheckpointError>(
          "'{}': {} differs from {}, but tie_word_embeddings is true in config.json, or its default. Which is right "
          "can't be known: set it to false to use the head (for T5 with \"scale_decoder_outputs\": true besides), or "
          "remove the head from the files.",
          source, name, words->first);
  }
}

std::string list(const std::vector<std::string>& lines) {
  constexpr size_t kMost = 20;
  std::string text;
  for (size_t i = 0; i < std::min(lines.size(), kMost); ++i) text.append("\n  ").append(lines[i]);
  if (lines.size() > kMost) text += fmt::format("\n  and {} more", lines.size() - kMost);
  return text;
}

/// Puts weights that have no values yet into one block of huge pages. Each keeps a storage of its own, whose pages go
/// when it goes.
void gather(const Tensors& weights) {
  constexpr int64_t kAlignment = 64;  // LibTorch's own
  std::map<const at::TensorImpl*, int64_t> offsets;
  std::vector<at::Tensor> gathered;
  int64_t bytes = 0;
  for (const auto& [name, weight] : weights) {
    if (!weight.is_cpu() || !weight.is_non_overlapping_and_dense() ||
        !offsets.emplace(weight.unsafeGetTensorImpl(), bytes).second)
      continue;
    bytes += (static_cast<int64_t>(weight.nbytes()) + kAlignment - 1) / kAlignment * kAlignment;
    gathered.push_back(weight);
  }
  if (bytes == 0) return;
  const at::Tensor block = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
  prefer_huge_pages(block);
  for (auto& weight : gathered) {
    auto* const begin = block.mutable_data_ptr<uint8_t>() + offsets.at(weight.unsafeGetTensorImpl());
    const auto size = static_cast<int64_t>(weight.nbytes());
    weight.set_data(at::from_blob(
        begin, weight.sizes(), weight.strides(), [block, begin, size](void*) { give_pages_back(begin, size); },
        weight.options().requires_grad(false)));
  }
}

}  // namespace

std::unique_ptr<InitScope> zero3_init(const std::filesystem::path& source) {
  const auto& plugins = accelerate::detail::deepspeed_plugins();
  if (!plugins || !plugins->makes_models_empty() || source.extension() == ".gguf") return nullptr;
  return std::unique_ptr<InitScope>(new InitScope(init_empty_weights()));
}

Tensors named_weights(const torch::nn::Module& module) {
  Tensors weights;
  for (const auto& item : module.named_parameters()) weights.emplace(item.key(), item.value());
  for (const auto& item : module.named_buffers()) weights.emplace(item.key(), item.value());
  return weights;
}

LoadReport load_weights(torch::nn::Module& module, const Tensors& tensors, const WeightRules& rules,
                        const std::string& source, const ReadWeight& read) {
  LoadReport report;
  std::vector<std::pair<at::Tensor, Tensors::const_iterator>> copies;
  std::vector<std::string> differences;
  std::vector<std::string> lost;
  std::set<std::string> used;
  check_tied(tensors, rules, source);
  for (const auto& [name, target] : named_weights(module)) {
    const auto found = find(tensors, name, rules);
    if (found == tensors.end()) {
      report.missing_keys.push_back(name);
      if (!starts_with_any(name, rules.head_prefixes)) lost.push_back(name);
      continue;
    }
    used.insert(found->first);
    const auto& value = found->second;
    if (value.sizes() == target.sizes() && value.is_floating_point() == target.is_floating_point()) {
      copies.emplace_back(target, found);
    } else {
      report.mismatched_keys.push_back(name);
      differences.push_back(fmt::format("{}: {} {} in the file, {} {} in the model", name, value.sizes(),
                                        c10::toString(value.scalar_type()), target.sizes(),
                                        c10::toString(target.scalar_type())));
    }
  }
  std::string errors;
  if (!differences.empty() && !rules.ignore_mismatched_sizes)
    errors += fmt::format(
        "{} tensors do not fit the model:{}\nIs config.json of another model? If only the head differs in its number "
        "of labels, pass ignore_mismatched_sizes to start with a fresh one.",
        differences.size(), list(differences));
  if (!lost.empty())
    errors += fmt::format(
        "{}{} tensors of the model are missing:{}\nThe checkpoint is incomplete or of another architecture.",
        errors.empty() ? "" : "\nAnd ", lost.size(), list(lost));
  if (!errors.empty()) raise<CheckpointError>("'{}': {}", source, errors);
  for (const auto& [name, tensor] : tensors)
    if (!used.contains(name) && !ends_with_any(name, rules.ignored_suffixes)) report.unexpected_keys.push_back(name);

  const c10::NoGradGuard no_grad;
  for (auto& [target, found] : copies) read ? read(found->first, target) : void(target.copy_(found->second));
  return report;
}

LoadReport load_pretrained(torch::nn::Module& module, const std::filesystem::path& source, const WeightRules& rules) {
  if (const auto config = config_file(source); source.extension() != ".gguf" && is_there(config))
    refuse_quantized(JsonFile(config));
  gather(named_weights(module));
  if (source.extension() != ".gguf") return load_weights(module, load_checkpoint_files(source), rules, source.string());
  const GgufFile file(source);
  Tensors tensors;  // names and shapes only: numbers are decoded where they belong
  for (const auto& name : file.names())
    if (name != "rope_freqs.weight")
      tensors.emplace(name, at::empty(file.info(name).shape, at::TensorOptions().dtype(at::kFloat).device(at::kMeta)));
  struct RowRange {
    std::string name;
    at::Tensor rows;
    int64_t first;
  };
  std::vector<RowRange> ranges;
  auto report =
      load_weights(module, tensors, rules, source.string(), [&](const std::string& name, const at::Tensor& target) {
        if (!target.is_cpu() || !target.is_contiguous()) {
          const auto decoded =
              at::empty(target.sizes(), target.options().device(at::kCPU).memory_format(at::MemoryFormat::Contiguous));
          file.read(name, decoded);
          target.copy_(decoded);
          return;
        }
        // Long enough that few take long, short enough that all threads have some.
        constexpr int64_t kElements = 1 << 20;
        const at::Tensor rows = target.detach().view({-1, target.dim() > 0 ? target.size(-1) : 1});
        for (int64_t row = 0, most = std::max<int64_t>(kElements / std::max<int64_t>(rows.size(1), 1), 1);
             row < rows.size(0); row += most)
          ranges.push_back({name, rows.narrow(0, row, std::min(most, rows.size(0) - row)), row});
      });
  parallel_ranges(static_cast<int64_t>(ranges.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      file.read(ranges[static_cast<size_t>(i)].name, ranges[static_cast<size_t>(i)].rows,
                ranges[static_cast<size_t>(i)].first);
  });
  return report;
}

void load_folder(torch::nn::Module& module, const std::filesystem::path& source, const WeightRules& rules,
                 const std::function<void(const std::string&, at::Tensor)>& initialize, LoadReport* report) {
  auto found = load_pretrained(module, source, rules);
  auto parameters = module.named_parameters();
  for (const auto& name : found.missing_keys) initialize(name, parameters[name]);
  if (report) *report = std::move(found);
}

namespace {

/// Files that lack a weight would be read as ones whose weight is to be drawn anew.
void check_all_of(const torch::nn::Module& module, const std::map<std::string, at::Tensor>& weights) {
  if (weights.empty())
    raise<CheckpointError>(
        "save_pretrained: there are no weights. Of a sharded model rank 0 has what get_state_dict() gives, which all "
        "ranks call: save on the main process");
  const auto own = named_weights(module);
  for (const auto& [name, tensor] : own) {
    const auto found = weights.find(name);
    if (found == weights.end()) raise<CheckpointError>("save_pretrained: the weights have no '{}'", name);
    if (found->second.sizes() != tensor.sizes())
      raise<CheckpointError>("save_pretrained: '{}' has the shape {}, expected {}", name, found->second.sizes(),
                             tensor.sizes());
  }
  for (const auto& [name, tensor] : weights)
    if (!own.contains(name)) raise<CheckpointError>("save_pretrained: this model has no '{}'", name);
}

}  // namespace

void save_folder(const torch::nn::Module& module, const std::map<std::string, at::Tensor>& weights,
                 const std::filesystem::path& folder, const std::function<std::string(const std::string&)>& config) {
  check_all_of(module, weights);
  const auto dtype = weights.begin()->second.scalar_type();
  create_folder(folder);
  // transformers refuses weights that do not say for which framework they are.
  save_safetensors(folder / "model.safetensors", weights, {{"format", "pt"}});
  write_text_file(folder / "config.json", config(dtype == at::kFloat      ? "float32"
                                                 : dtype == at::kBFloat16 ? "bfloat16"
                                                 : dtype == at::kHalf     ? "float16"
                                                                          : "float64"));
}

}  // namespace accelerate::models
