#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "accelerate/checkpoint/universal.hpp"
#include "accelerate/utils/progress.hpp"
#include "checkpoint/loss_scaler_object.hpp"
#include "checkpoint/universal_folder.hpp"
#include "checkpoint/zero_checkpoint.hpp"
#include "formats/torch_archive.hpp"
#include "input/read_file.hpp"
#include "input/regular_expression.hpp"
#include "utils/atomic_file.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using checkpointing::StoredTensor;
using checkpointing::StoredTensors;
using checkpointing::UniversalFolder;
using checkpointing::ZeroCheckpoint;
using formats::TorchPickle;

constexpr const char* kToUniversal = "convert_zero_checkpoint_to_universal";

void write_pickle(const fs::path& path, TorchPickle pickle) {
  AtomicFile out(kToUniversal, path);
  formats::write_torch_archive(std::move(pickle), [&](std::string_view bytes) { out.write(bytes); });
  out.finish();
}
void put(TorchPickle& pickle, const char* key, const c10::IValue& value) { pickle.text(key), pickle.value(value); }

void check(const char* what, const fs::path& path, const std::error_code& error) {
  if (error) raise<CheckpointError>("{}: can't {} '{}': {}", kToUniversal, what, path.string(), error.message());
}

/// The marks beside a tensor in the files, for programs that cut it over ranks of tensor parallelism.
struct Marks {
  std::optional<int64_t> cat_dim = 0;  ///< unset: all of those ranks have the whole
  bool two_in_one = false;             ///< of dimension 0
  std::optional<int64_t> rows;         ///< of a vocabulary, without its padding
};

/// The patterns of `universal_checkpoint_info`, in which a program that has tensor parallelism, such as
/// Megatron-DeepSpeed, says what its parameters are. They match from the beginning of a name on, as Python's re.match.
class Patterns {
 public:
  explicit Patterns(const c10::IValue& info) {
    if (!info.isGenericDict()) return;
    const auto dict = info.toGenericDict();
    const auto value = [&](const char* key) {
      const auto found = dict.find(key);
      return found == dict.end() ? c10::IValue() : found->value();
    };
    for (const char* key : {"parameter_with_sub_params", "affine_map", "autotp_unsupported_parameter_patterns"}) {
      const auto found = value(key);
      if ((found.isList() && !found.toListRef().empty()) || (found.isGenericDict() && !found.toGenericDict().empty()))
        raise<CheckpointError>(
            "{}: found '{}' in the checkpoint's universal_checkpoint_info, which describes pieces of tensor "
            "parallelism, expected a checkpoint of data parallelism alone; convert it with DeepSpeed's ds_to_universal",
            kToUniversal, key);
    }
    const auto read = [&](const char* key, std::vector<Pattern>& into) {
      const auto list = value(key);
      if (!list.isList()) return;
      for (const c10::IValue& item : list.toListRef())
        if (item.isString())
          into.push_back({item.toStringRef(), RegularExpression("(?:" + item.toStringRef() + ")[\\s\\S]*")});
    };
    read("tp_replicated_parameter_patterns", replicated_);
    read("parameter_to_average_patterns", averaged_);
    read("parameter_with_2_sub_params_cat_dim_0", two_in_one_);
    read("parameter_with_row_parallelism_patterns", rows_);
    read("vocabulary_parameter_patterns", vocabulary_);
    if (const auto size = value("original_vocab_size"); size.isInt()) vocabulary_size_ = size.toInt();
    if (!vocabulary_.empty() && vocabulary_size_ < 1)
      raise<CheckpointError>(
          "{}: found vocabulary_parameter_patterns without original_vocab_size in the checkpoint's "
          "universal_checkpoint_info, expected both",
          kToUniversal);
  }

  Marks of(const std::string& name) {
    Marks marks;
    const bool whole = match(replicated_, name) || match(averaged_, name);
    if (whole) marks.cat_dim.reset();
    else if (match(two_in_one_, name)) marks.two_in_one = true;
    else if (match(rows_, name)) marks.cat_dim = 1;
    if (match(vocabulary_, name)) marks.rows = vocabulary_size_;
    return marks;
  }
  std::vector<std::string> unused() const {
    std::vector<std::string> result;
    for (const auto* list : {&replicated_, &averaged_, &two_in_one_, &rows_, &vocabulary_})
      for (const auto& pattern : *list)
        if (!pattern.used) result.push_back(pattern.text);
    return result;
  }

 private:
  struct Pattern {
    std::string text;
    RegularExpression expression;
    bool used = false;
  };
  static bool match(std::vector<Pattern>& list, const std::string& name) {
    const auto fits = [&](const Pattern& pattern) { return pattern.expression.matches(name); };
    const auto found = std::find_if(list.begin(), list.end(), fits);
    if (found == list.end()) return false;
    if (const auto other = std::find_if(found + 1, list.end(), fits); other != list.end())
      raise<CheckpointError>(
          "{}: found '{}' and '{}' in one list of the checkpoint's universal_checkpoint_info, which both match '{}', "
          "expected one of them",
          kToUniversal, found->text, other->text, name);
    return found->used = true;
  }

  std::vector<Pattern> replicated_, averaged_, two_in_one_, rows_, vocabulary_;
  int64_t vocabulary_size_ = 0;
};

/// One file: a dict of the tensor, which is read while it is written, and its marks.
void write_tensor(const fs::path& path, const StoredTensor& stored, at::ScalarType dtype,
                  const std::optional<Marks>& marks) {
  auto sizes = stored.sizes;
  if (marks && marks->rows && !sizes.empty()) sizes[0] = std::min(sizes[0], *marks->rows);
  TorchPickle pickle;
  pickle.empty_dict(), pickle.mark();
  if (marks && marks->cat_dim) put(pickle, "cat_dim", *marks->cat_dim);
  if (marks && marks->two_in_one) put(pickle, "param_n_sub_params", int64_t{2});
  if (marks && marks->rows) put(pickle, "vocab_tensor", true);
  pickle.text("param"), pickle.tensor(dtype, sizes, false, [&stored, sizes, dtype] {
    if (sizes == stored.sizes) return stored.read_whole().to(dtype);
    const at::Tensor part = at::empty(sizes, at::TensorOptions().dtype(dtype));
    stored.read({.offsets = std::vector<int64_t>(sizes.size(), 0), .sizes = sizes}, part);
    return part;
  });
  pickle.set_items_to_mark();
  write_pickle(path, std::move(pickle));
}

StoredTensor zeros_like(const StoredTensor& other, at::ScalarType dtype) {
  return {.dtype = dtype,
          .sizes = other.sizes,
          .bytes = std::nullopt,
          .read = nullptr,
          .read_whole = [sizes = other.sizes, dtype] { return at::zeros(sizes, at::TensorOptions().dtype(dtype)); }};
}

class Conversion {
 public:
  Conversion(const ZeroCheckpoint& checkpoint, const fs::path& output, const UniversalOptions& options)
      : checkpoint_(checkpoint),
        output_(output),
        zero_(output / UniversalFolder::kFolder),
        // The tool looks at patterns where files are of stages 1 and 2; loading at stage 3 knows none of them.
        patterns_(checkpoint.stage() < 3 ? checkpoint.model_value("universal_checkpoint_info") : c10::IValue()),
        weights_(checkpoint.weights()),
        optimizer_(checkpoint.optimizer()),
        options_(options) {}

  void write(const std::string& name) {
    ProgressBar bar({.total = static_cast<int64_t>(weights_.size()),
                     .description = "Converting " + name,
                     .unit = "tensor",
                     .enabled = {}});
    std::set<std::string> trained;
    for (const auto& parameter : checkpoint_.trained()) trained.insert(parameter.name);
    for (int64_t group = 0; const auto& group_kinds : kinds_by_group()) {
      const auto step = checkpoint_.step(group);
      for (const auto& parameter : checkpoint_.trained()) {
        if (parameter.group != group) continue;
        write_parameter(parameter.name, group_kinds, step);
        bar.update();
      }
      ++group;
    }
    if (const auto unused = patterns_.unused(); options_.strict && !unused.empty())
      raise<CheckpointError>(
          "{}: found patterns in the checkpoint's universal_checkpoint_info that match no parameter, expected each to "
          "match one: '{}'. Is it the checkpoint of another model? strict = false (--no_strict) passes over them",
          kToUniversal, fmt::join(unused, "', '"));
    // Weights that are not trained, as the tool has them: in fp32, and without marks.
    for (const auto& [other, stored] : weights_) {
      if (trained.contains(other)) continue;
      write_tensor(folder_of(other) / file_of(UniversalFolder::kMasters), stored, at::kFloat, std::nullopt);
      bar.update();
    }
    write_common();
    copy_model_files();
  }

 private:
  using Kinds = std::vector<std::pair<std::string, at::ScalarType>>;

  static std::string file_of(const std::string& kind) { return kind + ".pt"; }

  /// States of what is flat together; of a parameter that has none of a kind yet, zeros stand in the files.
  std::vector<Kinds> kinds_by_group() const {
    std::vector<std::map<std::string, at::ScalarType>> all;
    for (const auto& parameter : checkpoint_.trained()) {
      all.resize(std::max(all.size(), static_cast<size_t>(parameter.group) + 1));
      const auto states = optimizer_.state.find(parameter.name);
      if (states == optimizer_.state.end()) continue;
      for (const auto& [kind, stored] : states->second)
        if (kind != UniversalFolder::kStep) all[static_cast<size_t>(parameter.group)].emplace(kind, stored.dtype);
    }
    std::vector<Kinds> result;
    for (const auto& kinds : all) result.emplace_back(kinds.begin(), kinds.end());
    return result;
  }

  fs::path folder_of(const std::string& name) const {
    check_inside(kToUniversal, zero_, zero_ / name);
    std::error_code error;
    fs::create_directories(zero_ / name, error);
    check("make the folder", zero_ / name, error);
    return zero_ / name;
  }

  void write_parameter(const std::string& name, const Kinds& kinds, const c10::IValue& step) {
    const auto folder = folder_of(name);
    const auto marks = patterns_.of(name);
    const auto& master = weights_.at(name);
    write_tensor(folder / file_of(UniversalFolder::kMasters), master, master.dtype, marks);
    const auto states = optimizer_.state.find(name);
    for (const auto& [kind, dtype] : kinds) {
      const bool has = states != optimizer_.state.end() && states->second.contains(kind);
      const auto state = has ? states->second.at(kind) : zeros_like(master, dtype);
      write_tensor(folder / file_of(kind), state, dtype, marks);
    }
    if (step.isNone()) return;
    TorchPickle pickle;
    pickle.value(step);
    write_pickle(folder / file_of(UniversalFolder::kStep), std::move(pickle));
  }

  /// The facts that all parameters have in common, for loading at any stage: at stages 1 and 2 and at stage 3 DeepSpeed
  /// looks for the same things at other places.
  void write_common() const {
    TorchPickle pickle;
    pickle.empty_dict(), pickle.mark();
    const auto dynamic = checkpoint_.optimizer_value("dynamic_loss_scale");
    if (const auto scaler = checkpoint_.optimizer_value("loss_scaler"); scaler.isGenericDict())
      pickle.text("loss_scaler"),
          checkpointing::write_loss_scaler(pickle, scaler, scaler.toGenericDict().contains("scale_window"));
    if (!dynamic.isNone()) put(pickle, "dynamic_loss_scale", dynamic);
    for (const char* key : {"overflow", "clip_grad", "group_paddings", "partition_count", "accelerate_steps"})
      if (const auto value = checkpoint_.optimizer_value(key); !value.isNone()) put(pickle, key, value);
    put(pickle, "zero_stage", checkpoint_.stage());
    auto version = checkpoint_.optimizer_value("ds_version");
    put(pickle, "ds_version", version.isNone() ? checkpoint_.model_value("ds_version") : version);
    const auto groups = checkpoint_.param_groups();
    put(pickle, "param_groups", groups);
    pickle.text("optimizer_state_dict"), pickle.empty_dict(), pickle.mark();
    put(pickle, "param_groups", groups);
    pickle.text("state"), pickle.empty_dict(), pickle.mark();
    for (size_t group = 0; group < kinds_by_group().size(); ++group)
      if (const auto step = checkpoint_.step(static_cast<int64_t>(group)); !step.isNone()) {
        pickle.integer(static_cast<int64_t>(group)), pickle.empty_dict(), pickle.mark();
        put(pickle, UniversalFolder::kStep, step);
        pickle.set_items_to_mark();
      }
    pickle.set_items_to_mark();
    pickle.set_items_to_mark();
    pickle.set_items_to_mark();
    write_pickle(zero_ / "optimizer_state.pt", std::move(pickle));
  }

  /// They hold the schedule, buffers, what is frozen, and the program's own; at stages 1 and 2 and at stage 3 DeepSpeed
  /// looks for them under other names.
  void copy_model_files() const {
    const char *const whole = "mp_rank_00_model_states.pt", *const cut = "zero_pp_rank_0_mp_rank_00_model_states.pt";
    for (const auto& file : checkpoint_.model_files()) {
      std::error_code error;
      const auto copy = output_ / file.filename();
      fs::copy_file(file, copy, error);
      check("write", copy, error);
      const auto other = output_ / (file.filename() == whole ? cut : whole);
      if (file.filename() != whole && file.filename() != cut) continue;
      fs::create_hard_link(copy, other, error);
      if (!error) continue;
      fs::copy_file(copy, other, error);  // of a file system that has no links
      check("write", other, error);
    }
  }

  const ZeroCheckpoint& checkpoint_;
  fs::path output_, zero_;
  Patterns patterns_;
  StoredTensors weights_;
  checkpointing::StoredOptimizer optimizer_;
  UniversalOptions options_;
};

/// A folder that goes again unless it gets its name.
class UnfinishedFolder {
 public:
  explicit UnfinishedFolder(fs::path name)
      : name_(std::move(name)), where_(name_.parent_path() / ("." + name_.filename().string() + ".unfinished")) {
    std::error_code error;
    fs::remove_all(where_, error);
    fs::create_directories(where_, error);
    check("make the folder", where_, error);
  }
  ~UnfinishedFolder() {
    std::error_code ignored;
    fs::remove_all(where_, ignored);
  }
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;

  const fs::path& where() const { return where_; }
  void publish() const {
    std::error_code error;
    fs::rename(where_, name_, error);  // takes the place of an empty folder, too
    check("give what was written the name", name_, error);
  }

 private:
  fs::path name_, where_;
};

}  // namespace

void convert_zero_checkpoint_to_universal(const fs::path& checkpoint_dir, const fs::path& output_dir,
                                          const UniversalOptions& options) {
  auto output = fs::absolute(output_dir).lexically_normal();
  if (!output.has_filename()) output = output.parent_path();  // "tag_universal/"
  const auto source = ZeroCheckpoint::find(checkpoint_dir, options.tag);
  std::error_code ignored;
  if (is_there(output) && !(is_folder(output) && fs::is_empty(output, ignored)))
    raise<CheckpointError>("{}: found something in '{}', expected a new or an empty folder; remove it, or give another",
                           kToUniversal, output.string());
  const ZeroCheckpoint checkpoint(source);
  if (checkpoint.is_universal())
    raise<CheckpointError>("{}: '{}' is a universal checkpoint already, expected one as it was saved", kToUniversal,
                           source.string());
  if (checkpoint.stage() == 0)
    raise<CheckpointError>(
        "{}: '{}' is of stage 0, whose files do not say which parameter a state belongs to, expected one of stages 1 "
        "to 3; load it as it is: its states are whole",
        kToUniversal, source.string());
  const UnfinishedFolder unfinished(output);
  Conversion(checkpoint, unfinished.where(), options).write(source.filename().string());
  unfinished.publish();
  AtomicFile latest(kToUniversal, output.parent_path() / ZeroCheckpoint::kLatestUniversal);
  latest.write(output.filename().string());
  latest.finish();
}

}  // namespace accelerate
