#pragma once

/// DeepSpeed's settings: the reference's DeepSpeedPlugin, and the configuration that it fills. Needs no LibTorch.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "accelerate/utils/export.hpp"

namespace accelerate {

/// A single value of the configuration; nullptr is JSON's null. Sections and lists are read as JSON, see
/// DeepSpeedConfig::to_json.
using DeepSpeedValue = std::variant<std::nullptr_t, bool, int64_t, double, std::string>;
/// Values by dotted key, such as "optimizer.params.lr".
using DeepSpeedValues = std::map<std::string, DeepSpeedValue>;

/// A DeepSpeed configuration: JSON with sections, whose keys are written "section.key" here. Keeps unknown keys, and
/// the order of all. As DeepSpeed does it reads HJSON: comments (#, //, /* */), commas that are left over or missing at
/// the ends of lines, names and texts without quotes.
class ACCELERATE_API DeepSpeedConfig {
 public:
  /// `source`: the path of a file, or JSON, or the same in base64 (also with - and _ for + and /), tried in this order.
  /// As Python's reader, it takes Infinity and NaN for numbers.
  /// @throws ConfigError when it is none of them, can't be read, is no JSON object, has more than 64 levels, or an
  /// object in it has a name twice.
  DeepSpeedConfig(const std::string& source);
  DeepSpeedConfig(const char* source) : DeepSpeedConfig(std::string(source)) {}
  DeepSpeedConfig(const std::filesystem::path& file) : DeepSpeedConfig(file.string()) {}
  DeepSpeedConfig(const DeepSpeedConfig& other);
  DeepSpeedConfig(DeepSpeedConfig&&) noexcept;
  DeepSpeedConfig& operator=(DeepSpeedConfig other) noexcept;
  ~DeepSpeedConfig();

  /// Nothing when the key or one of its sections is missing; null counts as missing. @throws ConfigError when it is a
  /// section or a list, or where a section of the key is none.
  std::optional<DeepSpeedValue> get_value(std::string_view key) const;
  /// Also true of sections, lists and null.
  bool contains(std::string_view key) const;
  /// Makes missing sections.
  void set_value(std::string_view key, const DeepSpeedValue& value);
  /// Removes a value or a section with all that is in it. @return whether it was there.
  bool del_config_sub_tree(std::string_view key);

  /// The value is the word "auto".
  bool is_auto(std::string_view key) const;
  /// A value that is there and counts as true (false) in Python: not zero, false or empty.
  bool is_true(std::string_view key) const;
  bool is_false(std::string_view key) const;
  /// zero_optimization.stage is 2 (3).
  bool is_zero2() const;
  bool is_zero3() const;
  /// In stage 2 or 3, optimizer states or parameters live in host memory or on NVMe.
  bool is_offload() const;

  /// A part of it (empty key: all) as Python's json writes it, indented by `indent` blanks, in one line if negative.
  /// @throws ConfigError when there is no such part.
  std::string to_json(std::string_view key = {}, int indent = -1) const;

  struct Document;
  Document& document() { return *document_; }              ///< for the library's own files
  const Document& document() const { return *document_; }  ///< likewise

 private:
  std::unique_ptr<Document> document_;
};

/// Says that a value is DeepSpeed's "auto": decided when the objects of a training are known.
struct Auto {
  bool operator==(const Auto&) const = default;
};

/// Fields that are unset come from the environment that `accelerate launch --use_deepspeed` sets, else the default.
/// With a configuration file its values win over both, except where they are "auto". Read by `parallel::resolve`. What
/// of a configuration acts: docs/deepspeed.md. Source: accelerate 1.15.0, DeepSpeedPlugin. Conformance:
/// deepspeed_plugin.json.
struct ACCELERATE_API DeepSpeedPlugin {
  /// DeepSpeed's own configuration. ACCELERATE_DEEPSPEED_CONFIG_FILE ("none": none), else one is made of the other
  /// fields.
  std::optional<DeepSpeedConfig> hf_ds_config;
  /// ACCELERATE_GRADIENT_ACCUMULATION_STEPS, else auto: what the Accelerator says.
  std::optional<std::variant<int64_t, Auto>> gradient_accumulation_steps;
  /// Largest norm of gradients; 0: any. ACCELERATE_GRADIENT_CLIPPING, else auto.
  std::optional<std::variant<double, Auto>> gradient_clipping;
  /// 0: nothing is split; 1: optimizer states; 2: gradients as well; 3: parameters as well.
  /// ACCELERATE_DEEPSPEED_ZERO_STAGE, else 2.
  std::optional<int64_t> zero_stage;
  /// Of several loaders' batch sizes the smallest counts as the one of training.
  bool is_train_batch_min = true;
  /// "none", "cpu" or "nvme". ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE, _OFFLOAD_PARAM_DEVICE, else none.
  std::optional<std::string> offload_optimizer_device, offload_param_device;
  /// Folders for "nvme". ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH, _OFFLOAD_PARAM_NVME_PATH, else "none".
  std::optional<std::string> offload_optimizer_nvme_path, offload_param_nvme_path;
  /// Models are split from the start; stage 3 only. from_pretrained() and from_config() of `accelerate::models` make
  /// them without memory then, as within init_empty_weights(), while this plugin is the active one; a program makes its
  /// own there. Where this is asked for and a model has its memory, prepare() says so. ACCELERATE_DEEPSPEED_ZERO3_INIT,
  /// else whether the stage is 3.
  std::optional<bool> zero3_init_flag;
  /// Save whole weights in 16 bits; stage 3. ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL, else false.
  std::optional<bool> zero3_save_16bit_model;
  /// Classes of mixture-of-experts layers, which stay whole. ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES, separated by
  /// commas.
  std::optional<std::vector<std::string>> transformer_moe_cls_names;
  /// fp8 by MS-AMP, not in stage 3. Whether ACCELERATE_FP8_BACKEND is MSAMP.
  std::optional<bool> enable_msamp;
  /// "O1" or "O2". ACCELERATE_FP8_OPT_LEVEL, else O1.
  std::optional<std::string> msamp_opt_level;
  /// The version of DeepSpeed whose defaults hold for what the configuration leaves out: they have moved, as
  /// gradient_clipping from 0 to 1.0 with 0.19.3. ACCELERATE_DEEPSPEED_AS_OF_VERSION, else 0.19.8.
  std::optional<std::string> as_of_version;
  /// Our extension: FullyShardedDataParallelPlugin::step_in_backward, of any stage.
  /// ACCELERATE_DEEPSPEED_STEP_IN_BACKWARD, else false.
  std::optional<bool> step_in_backward;
  /// Our extension: FullyShardedDataParallelPlugin::step_at_once, of any stage, without gradient_clipping.
  /// ACCELERATE_DEEPSPEED_STEP_AT_ONCE, else false.
  std::optional<bool> step_at_once;

  // Of a resolved plugin:

  /// @throws ConfigError before `resolve`.
  DeepSpeedConfig& deepspeed_config();
  const DeepSpeedConfig& deepspeed_config() const;
  bool is_auto(std::string_view key) const { return deepspeed_config().is_auto(key); }
  std::optional<DeepSpeedValue> get_value(std::string_view key) const { return deepspeed_config().get_value(key); }
  /// Replaces "auto" at `key` by `values[key]`, and nothing else. With `mismatches`, a line is added to them when the
  /// configuration and `values` say different things.
  /// @throws ConfigError when the configuration says "auto" and `values` has no such key.
  void fill_match(const std::string& key, const DeepSpeedValues& values,
                  std::vector<std::string>* mismatches = nullptr);
  /// The same at every key of the configuration. @throws ConfigError with all mismatches, if `must_match`; what was
  /// filled before stays.
  void deepspeed_config_process(const DeepSpeedValues& values, bool must_match = true);
  /// Writes "no", "fp16", "bf16" or "fp8" (computes in bf16) into the sections fp16 and bf16. @throws ConfigError when
  /// the configuration asks for the other type.
  void set_mixed_precision(std::string_view mixed_precision);
};

class AcceleratorState;
/// AcceleratorState::deepspeed_plugin(), as the reference's function.
ACCELERATE_API const DeepSpeedPlugin& get_active_deepspeed_plugin(const AcceleratorState& state);

namespace parallel {

/// Whether ACCELERATE_USE_DEEPSPEED is true. @throws ConfigError when it is no truth value.
ACCELERATE_API bool deepspeed_requested();

/// The plugin with every field decided and its configuration filled. Rank 0 warns of settings without effect.
/// @throws ConfigError for values that DeepSpeed does not have, a configuration without the section zero_optimization,
/// and a configuration beside settings that it would overrule (ACCELERATE_CONFIG_DS_FIELDS).
ACCELERATE_API DeepSpeedPlugin resolve(DeepSpeedPlugin plugin);

}  // namespace parallel
}  // namespace accelerate
