#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "parallel/zero/zero_settings.hpp"

/// Every key of DeepSpeed's, once: from these rows come reading, checks, defaults, verdicts and reasons.
namespace accelerate::zero {

/// The place of a value. Its alternative is the type of the key, and an optional one may be null.
using Place = std::variant<bool*, int64_t*, double*, std::string*, std::optional<bool>*, std::optional<int64_t>*,
                           std::optional<double>*, std::optional<std::string>*, std::vector<std::string>*,
                           std::vector<double>*, std::array<double, 2>*>;

enum class SettingState {
  acts,
  no_meaning,  ///< whatever the value: `reason` says why
  later,       ///< not in this version: only the default and `fine` are taken, `reason` says what comes nearest
  refused      ///< likewise, and `reason` says why and what to do instead
};

/// Why a key changes nothing with these settings; null where it acts.
using Idle = const char* (*)(const ZeroSettings& settings, const ReadOptions& options);

struct Row {
  const char* key;                          ///< as DeepSpeed documents it, with its sections
  Place (*place)(ZeroSettings&) = nullptr;  ///< null: nobody needs the value
  const char* other_name = nullptr;         ///< another spelling of its last part
  const char* old_name = nullptr;           ///< likewise, of which is warned
  const char* fallback = nullptr;           ///< the default of a row without a place, as JSON; null there: any value
  const char* types = nullptr;              ///< of a parameter: "Adam AdamW", the types that have it
  bool needed = false;                      ///< a parameter that its types can't do without
  SettingState state = SettingState::acts;
  const char* reason = nullptr;  ///< null: that of the section
  const char* fine = nullptr;    ///< values beside the default that `later` and `refused` take, a JSON list
  Idle idle = nullptr;
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  bool above = false, below = false;  ///< least and most themselves are not in it
  const char* choices = nullptr;      ///< "fp32|fp16|bf16"
  bool any_case = false;              ///< of the choices; the value is then as they are written
  bool no_truth = false;              ///< true and false are no numbers here
  bool infinite = false;              ///< Infinity is a number here
  bool nullable = false;              ///< null counts as absent, though the value is never empty
  const char* since = nullptr;        ///< the version that brought the key
  const char* moved = nullptr;        ///< the version that changed the default
  const char* before = nullptr;       ///< the default until then, as JSON
  bool secret = false;                ///< never written
};

struct Section {
  const char* key;
  /// DeepSpeed reads it with a class: "auto" counts as absent, and texts are read as numbers and truth values.
  bool classed = false;
  bool nullable = false;
  bool lenient = false;          ///< without a class, "true" and "false" are truth values all the same, with a warning
  const char* reason = nullptr;  ///< of the rows that have none
};

/// Types of optimizers and schedules.
struct Type {
  const char* name;
  SettingState state = SettingState::acts;
  const char* reason = nullptr;
  bool any_case = false;           ///< DeepSpeed's own nine optimizers
  bool tested = false;             ///< ZeRO takes it without zero_allow_untested_optimizer
  const char* defaults = nullptr;  ///< parameters whose default is another, a JSON object
};

/// Keys that are gone, with what does it now. `off`: values that only said that the feature is off, a JSON list; they
/// were taken before `until`.
struct Removed {
  const char* key;
  const char* instead;
  const char* off = "[]";
  const char* until = "0.19.7";
};

ACCELERATE_API const std::vector<Row>& setting_rows();
const std::vector<Section>& setting_sections();
ACCELERATE_API const std::vector<Type>& optimizer_types();
ACCELERATE_API const std::vector<Type>& scheduler_types();
const std::vector<Removed>& removed_settings();

/// The section of a key, "" for the top; null when there is none.
const Section* section_called(std::string_view key);

/// Null when there is none. `name` is the last part of a key in any of its spellings.
const Row* row_called(std::string_view section, std::string_view name);

/// "0.19.10" is not before "0.19.9". @throws ConfigError for what is no version.
ACCELERATE_API bool is_before(std::string_view version, std::string_view other);

}  // namespace accelerate::zero
