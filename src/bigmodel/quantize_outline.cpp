#include <ATen/ops/equal.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "accelerate/bigmodel/estimate.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "bigmodel/quantize_parts.hpp"
#include "formats/weight_names.hpp"

namespace accelerate::quantizing_files {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredTensors;

ModelDescription describe(const ModelConfig& config) {
  try {
    return describe_architecture(config.text);
  } catch (const ConfigError& error) {
    raise<ConfigError>(
        "{}: {} Which of its matrices are linear layers is not known then; load_and_quantize_model() quantizes any "
        "model that you build.",
        kOperation, error.what());
  } catch (const CheckpointError& error) {
    std::string_view what = error.what();
    constexpr std::string_view kWithoutPath = "config.json: ";
    if (what.starts_with(kWithoutPath)) what.remove_prefix(kWithoutPath.size());
    raise<CheckpointError>("{}: '{}': {}", kOperation, config.source, what);
  }
}

std::string class_of(const nlohmann::json& config) {
  const auto names = config.find("architectures");
  return names != config.end() && names->is_array() && !names->empty() && names->front().is_string()
             ? names->front().get<std::string>()
             : "";
}

/// How transformers ties the head where config.json does not say.
struct Head {
  const char* model_type;
  const char* name;
  bool is_tied;
};
constexpr Head kHeads[] = {{"gpt2", "lm_head", true},   {"gpt_neox", "embed_out", false}, {"gptj", "lm_head", false},
                           {"llama", "lm_head", false}, {"mistral", "lm_head", false},    {"mixtral", "lm_head", false},
                           {"opt", "lm_head", true},    {"qwen2", "lm_head", false},      {"qwen3", "lm_head", false},
                           {"t5", "lm_head", true}};

const Head* find_head(const std::string& model_type, const std::string& class_name) {
  const bool has_one = class_name.ends_with("ForCausalLM") || class_name.ends_with("LMHeadModel") ||
                       class_name == "T5ForConditionalGeneration";
  const auto* const found = std::ranges::find(kHeads, std::string_view(model_type), &Head::model_type);
  return has_one && found != std::end(kHeads) ? found : nullptr;
}

/// The first one in the tree, by its path.
std::string embeddings_of(const ModuleTree& module, const std::string& path) {
  if (module.class_name == "Embedding") return path + ".weight";
  for (const auto& child : module.children)
    if (auto found = embeddings_of(child, path.empty() ? child.name : path + "." + child.name); !found.empty())
      return found;
  return "";
}

/// The names that norms had in old files.
std::string name_of_today(const std::string& name) {
  for (const auto& [old, now] : {std::pair(".gamma", ".weight"), {".beta", ".bias"}})
    if (name.ends_with(old)) return module_of(name) + now;
  return name;
}

std::string show(const std::vector<int64_t>& shape, std::string_view dtype) {
  return fmt::format("[{}] {}", fmt::join(shape, ", "), dtype);
}

}  // namespace

Outline::Outline(const ModelConfig& config, bigmodel::OpenCheckpoint& checkpoint) {
  const auto model = describe(config);
  keep_in_fp32_modules = model.keep_in_fp32_modules;
  const auto of_type = config.json.find("model_type");
  const std::string type = of_type != config.json.end() && of_type->is_string() ? of_type->get<std::string>() : "",
                    class_name = class_of(config.json);
  joins_experts_ =
      std::ranges::any_of(checkpoint.tensors, [](const auto& item) { return item.first.ends_with(".gate_up_proj"); });
  has_other_names_ = type == "vit";
  const auto* const names = formats::weight_names_of_type(type);
  std::string body = names ? names->base_prefix : "";
  if (body.empty() || class_name.empty() || class_name == std::string(names->classes) + "Model")
    body = body_of(model.tree, checkpoint.tensors);
  else body.pop_back();  // its dot
  collect(model.tree, body);
  if (body.empty()) {
    for (const auto& child : model.tree.children) parts_.insert(child.name);
  } else {
    parts_.insert(body);
  }
  if (linear.empty())
    raise<ConfigError>("{}: {} has no linear layers, expected some", kOperation, model.tree.class_name);
  for (auto& [name, expected] : tensors_) {
    const std::string inner = body.empty() ? name : name.substr(body.size() + 1);
    if (inner.starts_with("pooler.") || (class_name.ends_with("EncoderModel") && inner.starts_with("decoder.")))
      expected.required = false;  // which some classes leave out
  }
  if (const Head* const known = find_head(type, class_name)) {
    head = known->name;
    words_ = embeddings_of(model.tree, body);
    const auto tie = config.json.find("tie_word_embeddings");
    is_tied_ = tie != config.json.end() && tie->is_boolean() ? tie->get<bool>() : known->is_tied;
    add(head + ".weight", {.name = {}, .shape = tensors_.at(words_).spec.shape}, !is_tied_);
  }
  if (!names) return;
  std::set<std::string> own;
  for (const auto& [name, expected] : tensors_) own.insert(name);
  bigmodel::use_names(checkpoint, *names, own);
}

/// A checkpoint of a model with a head has the body's names behind the name of the body ("model.", "bert.").
std::string Outline::body_of(const ModuleTree& tree, const StoredTensors& tensors) {
  collect(tree, "");
  std::map<std::string, int64_t> found{{"", 0}};
  for (const auto& [name, stored] : tensors) {
    const size_t dot = name.find('.');
    found[""] += tensors_.contains(name_of_today(name));
    if (dot != std::string::npos) found[name.substr(0, dot)] += tensors_.contains(name_of_today(name.substr(dot + 1)));
  }
  tensors_.clear(), linear.clear(), transposed.clear(), with_weight.clear();
  return std::ranges::max_element(found, {}, [](const auto& item) { return item.second; })->first;
}

void Outline::add(const std::string& name, TensorSpec spec, bool required) {
  tensors_.insert_or_assign(name, Expected{std::move(spec), required});
}

void Outline::collect(const ModuleTree& module, std::string path) {
  // Files have an expert's matrices one by one, and models of transformers all experts' as one tensor.
  if (module.class_name == "MixtralSparseMoeBlock" && !joins_experts_) path = module_of(path) + ".block_sparse_moe";
  if (module.class_name == "MixtralExperts" && !joins_experts_) {
    const auto& shape = module.parameters.at(1).shape;  // down_proj: experts, outputs, inputs
    for (int64_t expert = 0; expert < shape[0]; ++expert)
      for (const char* name : {"w1", "w2", "w3"})
        add(fmt::format("{}.{}.{}.weight", path, expert, name),
            {.name = {},
             .shape =
                 name == std::string_view("w2") ? std::vector{shape[1], shape[2]} : std::vector{shape[2], shape[1]}},
            true);
    return;
  }
  if (module.class_name == "Linear" || module.class_name == "Conv1D") linear.insert(path);
  if (module.class_name == "Conv1D") transposed.insert(path);
  const std::string before = path.empty() ? "" : path + ".";
  for (const auto& parameter : module.parameters) {
    if (parameter.name == "weight") with_weight.insert(path);
    add(before + parameter.name, parameter, true);
  }
  for (const auto& buffer : module.buffers)
    add(before + buffer.name, buffer, buffer.persistent && buffer.name != "num_batches_tracked");
  for (const auto& child : module.children) collect(child, before + child.name);
}

/// Heads are known of language models only.
bool Outline::is_of_a_head(const std::string& name) const {
  return head.empty() ? !parts_.contains(name.substr(0, name.find('.'))) : name.starts_with(head + ".");
}

void Outline::check(const fs::path& from, StoredTensors& tensors, std::vector<std::string>& notes) const {
  StateDictCheck check;
  std::set<std::string> found;
  std::set<int64_t> found_tied;
  for (const auto& [name, stored] : tensors) {
    const auto expected = tensors_.find(name_of_today(name));
    if (expected == tensors_.end()) {
      if (!formats::is_worked_out(name) && !is_of_a_head(name)) check.unexpected.push_back(name);
      continue;
    }
    found.insert(expected->first);
    const auto& spec = expected->second.spec;
    if (spec.identity != 0) found_tied.insert(spec.identity);
    if (spec.shape != stored.sizes || c10::isFloatingType(stored.dtype) != (spec.dtype == "float32"))
      check.mismatched.push_back(fmt::format("{}: {} in the checkpoint, {} in the model", name,
                                             show(stored.sizes, dtype_name(stored.dtype)),
                                             show(spec.shape, spec.dtype)));
  }
  for (const auto& [name, expected] : tensors_)
    if (expected.required && !found.contains(name) &&
        (expected.spec.identity == 0 || found_tied.insert(expected.spec.identity).second))
      check.missing.push_back(name);
  if (has_other_names_ && !check.missing.empty())
    raise<ConfigError>(
        "{}: '{}': files of this architecture have other names than its modules (there is no '{}'), so that which of "
        "its matrices are linear layers is not known. load_and_quantize_model() quantizes any model that you build.",
        kOperation, from.string(), check.missing.front());
  if (!check.fits())
    raise<CheckpointError>(
        "{}: '{}' does not fit the model that its configuration describes. Nothing was written.\n{}\nIs it the "
        "checkpoint of another model or configuration, or not whole?",
        kOperation, from.string(), check.text());
  if (is_tied_) leave_copy_out(from, tensors, notes);
}

void Outline::leave_copy_out(const fs::path& from, StoredTensors& tensors, std::vector<std::string>& notes) const {
  const auto copy = tensors.find(head + ".weight"), words = tensors.find(words_);
  if (copy == tensors.end() || words == tensors.end()) return;
  if (const auto values = copy->second.read_whole();
      !at::equal(values, words->second.read_whole().to(values.scalar_type())))
    raise<CheckpointError>(
        "{}: '{}': {} differs from {}, but tie_word_embeddings is true in config.json, or its default. Which is right "
        "can't be known: set it to false to use the head, or remove the head from the files.",
        kOperation, from.string(), copy->first, words_);
  notes.push_back(fmt::format("'{}' is a copy of '{}', to which it is tied, and was left out.", copy->first, words_));
  tensors.erase(copy);
}

}  // namespace accelerate::quantizing_files
