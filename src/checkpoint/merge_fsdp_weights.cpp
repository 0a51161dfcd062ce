#include <algorithm>
#include <limits>
#include <regex>
#include <set>
#include <unordered_map>

#include "accelerate/checkpoint.hpp"
#include "accelerate/state.hpp"
#include "accelerate/utils/progress.hpp"
#include "checkpoint/saved_state.hpp"
#include "checkpoint/weight_files.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "formats/dcp.hpp"
#include "formats/tensor_source.hpp"
#include "formats/torch_archive.hpp"
#include "input/read_file.hpp"
#include "utils/atomic_file.hpp"
#include "utils/log.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using formats::DcpCheckpoint;
using formats::DcpEntry;
using formats::DcpPath;
using formats::DcpTensorInfo;

/// The folder with the metadata: the one given, or the only model's in it.
fs::path checkpoint_folder(const fs::path& given) {
  if (formats::is_dcp_folder(given)) return given;
  const std::regex model("pytorch_model_fsdp_\\d+"), optimizer("optimizer_\\d+");
  std::vector<fs::path> models, optimizers;
  std::error_code error;
  if (is_folder(given))
    for (fs::directory_iterator entry(given, error), end; !error && entry != end; entry.increment(error)) {
      if (!formats::is_dcp_folder(entry->path())) continue;
      const auto name = entry->path().filename().string();
      if (std::regex_match(name, model)) models.push_back(entry->path());
      if (std::regex_match(name, optimizer)) optimizers.push_back(entry->path());
    }
  if (error)
    raise<CheckpointError>("merge_fsdp_weights: the folder '{}' can't be read: {}. Check its rights.", given.string(),
                           error.message());
  if (models.size() == 1) return models.front();
  std::vector<std::string> found;
  for (const auto* list : {&models, &optimizers})
    for (const auto& path : *list) found.push_back(fmt::format("'{}'", path.string()));
  raise<CheckpointError>("merge_fsdp_weights: '{}' {}, expected the folder of a distributed checkpoint.{}",
                         given.string(), is_there(given) ? "holds no file .metadata" : "does not exist",
                         found.empty()
                             ? " Only SHARDED_STATE_DICT saves one; the other state dict types need no merging."
                             : fmt::format(" It contains some: pass one of {}.", fmt::join(found, ", ")));
}

/// A value of the checkpoint and where it goes in what is written.
struct MergedItem {
  const DcpEntry* entry;
  DcpPath path;
};

const std::string* first_key(const DcpEntry& entry) {
  return entry.path ? std::get_if<std::string>(&entry.path->front()) : nullptr;
}

/// The values under the one top-level key, or under "model" where there are several.
std::vector<MergedItem> select_items(const DcpCheckpoint& checkpoint) {
  std::set<std::string> tops;
  bool nested = true;
  for (const auto& entry : checkpoint.entries()) {
    const auto* key = first_key(entry);
    nested = nested && key && entry.path->size() > 1;
    tops.insert(key ? *key : entry.name);
  }
  const std::string* top = nullptr;
  if (tops.size() == 1 && nested) top = &*tops.begin();
  if (tops.size() > 1 && tops.contains("model")) top = &*tops.find("model");
  std::vector<MergedItem> items;
  for (const auto& entry : checkpoint.entries()) {
    if (!top) {
      items.push_back({&entry, entry.path ? *entry.path : DcpPath(1, entry.name)});
    } else if (const auto* key = first_key(entry); key && *key == *top && entry.path->size() > 1) {
      items.push_back({&entry, DcpPath(entry.path->begin() + 1, entry.path->end())});
    }
  }
  if (items.empty()) raise<CheckpointError>("merge_fsdp_weights: '{}' holds no weights.", checkpoint.folder().string());
  return items;
}

int64_t bytes_of(const DcpTensorInfo& info) {
  return formats::checked_numel(info.sizes).value_or(0) *
         static_cast<int64_t>(c10::elementSize(formats::scalar_type(info)));
}

/// Nested dicts and lists with values at their ends, to be written as one pickle.
class MergedTree {
 public:
  void insert(const MergedItem& item, size_t depth = 0) {
    if (depth == item.path.size()) {
      if (entry_ || !children_.empty()) clash(item);
      entry_ = item.entry;
      return;
    }
    const auto& step = item.path[depth];
    const bool list = std::holds_alternative<int64_t>(step);
    if (entry_ || (!children_.empty() && list != list_)) clash(item);
    list_ = list;
    const auto [found, fresh] = index_.try_emplace(
        list ? std::to_string(std::get<int64_t>(step)) : std::get<std::string>(step), children_.size());
    if (fresh) children_.emplace_back(step, MergedTree());
    children_[found->second].second.insert(item, depth + 1);
  }

  /// `leaf(entry)` writes a value.
  template <class F> void write(formats::TorchPickle& pickle, F&& leaf) const {
    if (entry_) return leaf(*entry_);
    if (!list_) {
      pickle.empty_dict(), pickle.mark();
      for (const auto& [key, child] : children_) pickle.text(std::get<std::string>(key)), child.write(pickle, leaf);
      return pickle.set_items_to_mark();
    }
    std::map<int64_t, const MergedTree*> ordered;
    for (const auto& [position, child] : children_) ordered.emplace(std::get<int64_t>(position), &child);
    pickle.empty_list(), pickle.mark();
    int64_t next = 0;
    for (const auto& [position, child] : ordered) {
      for (; next < position; ++next) pickle.none();  // as Python fills gaps
      child->write(pickle, leaf), ++next;
    }
    pickle.append_to_mark();
  }

 private:
  [[noreturn]] static void clash(const MergedItem& item) {
    raise<CheckpointError>(
        "merge_fsdp_weights: the path of '{}' leads through a value that another path gives another meaning. The "
        "metadata contradicts itself.",
        item.entry->name);
  }

  const DcpEntry* entry_ = nullptr;
  bool list_ = false;
  std::vector<std::pair<std::variant<std::string, int64_t>, MergedTree>> children_;
  std::unordered_map<std::string, size_t> index_;
};

class Merger {
 public:
  Merger(const fs::path& folder, const fs::path& output, const MergeFsdpWeightsOptions& options)
      : checkpoint_(folder), items_(select_items(checkpoint_)), output_(output), options_(options) {}

  void run() {
    const auto max_bytes = options_.max_shard_size ? checkpointing::parse_size(*options_.max_shard_size)
                                                   : std::numeric_limits<int64_t>::max();
    std::vector<checkpointing::WeightSize> weights;
    std::string why_not_flat;
    for (const auto& item : items_) {
      const auto* info = std::get_if<DcpTensorInfo>(&item.entry->content);
      const auto* key = std::get_if<std::string>(&item.path.front());
      if (why_not_flat.empty() && !info)
        why_not_flat = fmt::format("'{}' is an object, not a tensor", item.entry->name);
      if (why_not_flat.empty() && (item.path.size() > 1 || !key))
        why_not_flat = fmt::format("'{}' lies in nested dicts or lists", item.entry->name);
      if (!why_not_flat.empty()) continue;
      if (!by_name_.emplace(*key, &item).second)
        raise<CheckpointError>(
            "merge_fsdp_weights '{}': two tensors have the name '{}'. The metadata contradicts itself.",
            checkpoint_.folder().string(), *key);
      weights.push_back({*key, bytes_of(*info)});
    }
    if (!why_not_flat.empty()) {
      const auto found = fmt::format("merge_fsdp_weights '{}': {}", checkpoint_.folder().string(), why_not_flat);
      if (options_.safe_serialization)
        raise<ConfigError>(
            "{}, and safetensors holds a flat list of tensors only. It may be the state of an optimizer: pass "
            "safe_serialization = false to write a pytorch_model.bin.",
            found);
      if (options_.max_shard_size)
        raise<ConfigError>("{}, and only a flat list of tensors can be split into shards. Leave max_shard_size unset.",
                           found);
      weights = {{"", 0}};  // one file with everything
    }
    if (why_not_flat.empty()) say_what_is_missing();

    bar_.emplace(ProgressBarOptions{.total = static_cast<int64_t>(items_.size()),
                                    .description = "Merging " + checkpoint_.folder().filename().string(),
                                    .unit = "tensor",
                                    .enabled = {}});
    checkpointing::write_weight_files(output_, weights, max_bytes, options_.safe_serialization,
                                      [&](const fs::path& file, const std::vector<std::string>& names) {
                                        std::vector<const MergedItem*> part;
                                        if (why_not_flat.empty()) {
                                          for (const auto& name : names) part.push_back(by_name_.at(name));
                                        } else {
                                          for (const auto& item : items_) part.push_back(&item);
                                        }
                                        if (options_.safe_serialization) write_safetensors(file, part);
                                        else write_archive(file, part);
                                      });
  }

 private:
  /// Checkpoints leave weights in few bits out, and adapters of them are no model without them.
  void say_what_is_missing() const {
    std::vector<std::string> without;
    for (const auto& [name, item] : by_name_)
      if (const auto end = name.find(".lora_A."); end != std::string::npos) {
        const auto target = name.substr(0, end);
        if (!by_name_.contains(target + ".weight") && !by_name_.contains(target + ".base_layer.weight"))
          without.push_back(target + ".weight");
      }
    if (without.empty()) return;
    logs::warn("accelerate.checkpoint",
               "merge_fsdp_weights: '{}' has adapters of {} weights and not these themselves ('{}'{}): they are in few "
               "bits, which checkpoints leave out. What is written is no whole model. Load the base from its own files "
               "and this over it, or save the adapter as a folder (LoraAdapter::save).",
               checkpoint_.folder().string(), without.size(), *std::ranges::min_element(without),
               without.size() > 1 ? ", …" : "");
  }

  std::function<at::Tensor()> reader(const DcpEntry& entry) {
    return [this, &entry] {
      bar_->update();
      return checkpoint_.read_full(entry.name);
    };
  }

  void write_safetensors(const fs::path& file, const std::vector<const MergedItem*>& items) {
    std::vector<formats::TensorSource> sources;
    for (const auto* item : items) {
      const auto& info = std::get<DcpTensorInfo>(item->entry->content);
      sources.push_back(
          {std::get<std::string>(item->path.front()), formats::scalar_type(info), info.sizes, reader(*item->entry)});
    }
    formats::write_safetensors(file, std::move(sources), {{"format", "pt"}});
  }

  void write_archive(const fs::path& file, const std::vector<const MergedItem*>& items) {
    MergedTree tree;
    for (const auto* item : items) tree.insert(*item);
    formats::TorchPickle pickle;
    tree.write(pickle, [&](const DcpEntry& entry) {
      if (const auto* info = std::get_if<DcpTensorInfo>(&entry.content))
        return pickle.tensor(formats::scalar_type(*info), info->sizes, false, reader(entry));
      bar_->update();
      pickle.value(checkpoint_.read_object(entry.name));
    });
    AtomicFile out("merge_fsdp_weights", file);
    formats::write_torch_archive(std::move(pickle), [&](std::string_view bytes) { out.write(bytes); });
    out.finish();
  }

  DcpCheckpoint checkpoint_;
  std::vector<MergedItem> items_;
  fs::path output_;
  const MergeFsdpWeightsOptions& options_;
  std::unordered_map<std::string, const MergedItem*> by_name_;
  std::optional<ProgressBar> bar_;
};

}  // namespace

checkpointing::StoredTensors checkpointing::open_merged(const fs::path& given) {
  const auto checkpoint = std::make_shared<const DcpCheckpoint>(checkpoint_folder(given));
  StoredTensors tensors;
  for (const auto& item : select_items(*checkpoint)) {
    const auto* name = std::get_if<std::string>(&item.path.front());
    if (item.path.size() > 1 || !name || !std::holds_alternative<DcpTensorInfo>(item.entry->content))
      raise<ConfigError>(
          "'{}': '{}' is no tensor in a flat list, expected the weights of a model. It may be the state of an "
          "optimizer, which `accelerate merge-weights --unsafe_serialization` writes as one archive of torch.save.",
          checkpoint->folder().string(), item.entry->name);
    if (!tensors.emplace(*name, stored_in(checkpoint, *item.entry)).second)
      raise<CheckpointError>("'{}': two tensors have the name '{}'. The metadata contradicts itself.",
                             checkpoint->folder().string(), *name);
  }
  return tensors;
}

void merge_fsdp_weights(const fs::path& checkpoint_dir, const fs::path& output_path,
                        const MergeFsdpWeightsOptions& options) {
  const PartialState state;
  if (state.is_main_process()) {
    const auto folder = checkpoint_folder(checkpoint_dir);
    if (options.remove_checkpoint_dir) {
      const auto inside = fs::weakly_canonical(output_path).lexically_relative(fs::weakly_canonical(folder));
      if (!inside.empty() && *inside.begin() != "..")
        raise<ConfigError>(
            "merge_fsdp_weights: the weights would be written into '{}', which lies in the checkpoint that "
            "remove_checkpoint_dir removes. Choose another folder.",
            output_path.string());
    }
    Merger(folder, output_path, options).run();
    if (options.remove_checkpoint_dir) {
      fs::remove_all(folder);
      formats::forget_in_manifest(folder);  // what is left of a run's checkpoint is whole without it
    }
  }
  state.wait_for_everyone();
}

}  // namespace accelerate
