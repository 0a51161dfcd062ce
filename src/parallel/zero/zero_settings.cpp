#include "parallel/zero/zero_settings.hpp"

#include <algorithm>
#include <map>

#include "accelerate/config.hpp"
#include "input/json.hpp"
#include "parallel/zero/document.hpp"
#include "parallel/zero/setting_rules.hpp"
#include "parallel/zero/setting_values.hpp"
#include "parallel/zero/settings_table.hpp"
#include "utils/raise.hpp"

namespace accelerate::zero {
namespace {

using Json = nlohmann::ordered_json;

bool has_word(std::string_view words, std::string_view word) {
  for (size_t at = words.find(word); at != words.npos; at = words.find(word, at + 1)) {
    const size_t end = at + word.size();
    if ((at == 0 || words[at - 1] == ' ') && (end == words.size() || words[end] == ' ')) return true;
  }
  return false;
}

std::string small_letters_of(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string section_of(const Row& row) {
  const std::string key = row.key;
  const size_t dot = key.rfind('.');
  return dot == key.npos ? "" : key.substr(0, dot);
}

std::string last_part(const char* key) {
  const std::string whole = key;
  return whole.substr(whole.rfind('.') + 1);
}

std::string joined_key(std::string_view section, std::string_view name) {
  return section.empty() ? std::string(name) : std::string(section) + "." + std::string(name);
}

/// A value as a message or an entry shows it.
std::string shown(const Row& row, const Json& value, size_t most_bytes) {
  return row.secret && !value.is_null() ? "\"(hidden)\"" : show_json(value, most_bytes);
}

class SettingsReader {
 public:
  SettingsReader(const DeepSpeedConfig::Document& document, const ReadOptions& options)
      : document_(document), options_(options), removed_are_errors_(!is_before(options.as_of_version, "0.19.7")) {
    if (options.ranks < 1) raise<ConfigError>("DeepSpeed configuration: {} ranks, expected at least 1", options.ranks);
  }

  ZeroSettings read() {
    settings_.as_of_version = options_.as_of_version;
    for (const auto& row : setting_rows())
      if (row.moved && row.place && is_before(options_.as_of_version, row.moved))
        set_place(row.place(settings_), json_of(row.before));
    read_types();
    defaults_ = settings_;
    walk(document_.json, "", "");
    for (auto& [row, found] : given_) take(*row, found);
    std::erase_if(given_, [](const auto& item) { return item.second.absent; });
    GivenKeys keys;
    for (const auto& [row, found] : given_) keys.insert(row->key);
    translate_older_keys(keys);
    derive(settings_, keys, options_, findings_);
    check_needed(keys);
    check_together(settings_, keys, options_, findings_);
    for (const auto& [row, found] : given_) check_state(*row, found);
    end_with_findings();
    settings_.warnings = std::move(findings_.warnings);
    list_effective();
    return std::move(settings_);
  }

 private:
  struct Found {
    const Json* node = nullptr;
    std::string written;  ///< the key as the file spells it
    Json value = nullptr;
    bool absent = false;  ///< null, "auto" or wrong
  };

  template <class... Args> void problem(fmt::format_string<Args...> text, Args&&... args) {
    findings_.problems.push_back(fmt::format(text, std::forward<Args>(args)...));
  }

  /// The types of the optimizer and the schedule, whose parameters depend on them.
  void read_types() {
    if (const Type* type = type_of("optimizer", optimizer_types())) {
      settings_.optimizer.emplace().type = type->name;
      take_defaults(*type, "optimizer.params");
    }
    if (const Type* type = type_of("scheduler", scheduler_types())) {
      settings_.scheduler.emplace().type = type->name;
      take_defaults(*type, "scheduler.params");
    }
  }

  const Type* type_of(const std::string& section, const std::vector<Type>& types) {
    const auto node = document_.json.find(section);
    if (node == document_.json.end() || !node->is_object() || node->empty()) return nullptr;
    const auto given = node->find("type");
    const std::string key = section + ".type";
    if (given == node->end() || !given->is_string()) {
      problem("'{}' is {}, expected one of {}", key, given == node->end() ? "missing" : show_json(*given),
              fmt::join(names_of(types), ", "));
      return nullptr;
    }
    const auto& name = given->get_ref<const std::string&>();
    for (const auto& type : types) {
      if (!(type.any_case ? small_letters_of(name) == small_letters_of(type.name) : name == type.name)) continue;
      if (type.state == SettingState::acts) return &type;
      if (type.state == SettingState::refused) {
        problem("'{}' is \"{}\", which is not here: {}", key, type.name, type.reason);
        return nullptr;
      }
      findings_.later.push_back(
          fmt::format("'{}' is \"{}\", which is not in this version: {}", key, type.name, type.reason));
      return &type;
    }
    const auto nearest = nearest_name(name, names_of(types));
    problem("'{}' is {}, expected one of {}{}", key, show_json(*given), fmt::join(names_of(types), ", "),
            nearest ? fmt::format("; did you mean {}?", *nearest) : "");
    return nullptr;
  }

  static std::vector<std::string> names_of(const std::vector<Type>& types) {
    std::vector<std::string> names;
    for (const auto& type : types)
      if (type.state != SettingState::refused) names.emplace_back(type.name);
    return names;
  }

  void take_defaults(const Type& type, const char* section) {
    if (!type.defaults) return;
    const Json values = json_of(type.defaults);
    for (const auto& [name, value] : values.items()) {
      const Row* row = row_called(section, name);
      set_place(row->place(settings_), is_list(*row) && !value.is_array() ? Json::array({value}) : value);
    }
  }
  bool is_list(const Row& row) { return std::holds_alternative<std::vector<double>*>(row.place(settings_)); }

  /// Whether the row belongs to what the file has: of an optimizer, the parameters of its type.
  bool applies(const Row& row) const {
    const std::string_view key = row.key;
    if (key.starts_with("optimizer."))
      return settings_.optimizer && (!row.types || has_word(row.types, settings_.optimizer->type));
    if (key.starts_with("scheduler."))
      return settings_.scheduler && (!row.types || has_word(row.types, settings_.scheduler->type));
    return true;
  }

  /// `section` is the canonical name, `written` as the file has it.
  void walk(const Json& node, const std::string& section, const std::string& written) {
    for (const auto& [name, child] : node.items()) {
      const std::string key = joined_key(section, name), as_written = joined_key(written, name);
      if (name.starts_with('_')) {
        note(as_written, child, "a note: its name begins with _");
      } else if (section.empty() && name == "bfloat16") {
        if (document_.json.contains("bf16")) note(as_written, child, "the section bf16 is there");
        else walk_section("bf16", as_written, child);
      } else if (section.empty() && name == "zero_optimization" && child.is_boolean()) {
        stage_of_flag_ = child.get<bool>() ? 1 : 0;
      } else if (section_called(key)) {
        walk_section(key, as_written, child);
      } else if (const Row* row = row_called(section, name); row && applies(*row)) {
        add(*row, as_written, child);
      } else if (!is_removed(key, child)) {
        refuse_unknown(section, as_written, name);
      }
    }
  }

  void walk_section(const std::string& key, const std::string& written, const Json& child) {
    const Section& section = *section_called(key);
    const bool in_class = key.find('.') != key.npos && section_called(key.substr(0, key.rfind('.')))->classed;
    if ((child.is_null() && (section.nullable || !section.classed)) || (in_class && child == "auto")) return;
    if (!child.is_object())
      return problem("'{}' is {}, expected a section{}", written, show_json(child),
                     section.nullable ? ", or null" : "");
    // Without a type that is understood nothing is known of parameters: the type has to be corrected.
    if ((key == "optimizer" && !settings_.optimizer) || (key == "scheduler" && !settings_.scheduler)) return;
    sections_.insert(key);
    walk(child, key, written);
  }

  void add(const Row& row, const std::string& written, const Json& child) {
    auto [place, fresh] = given_.try_emplace(&row, Found{.node = &child, .written = written});
    if (!fresh) problem("'{}' and '{}' are one setting; write one of them", place->second.written, written);
    if (row.old_name && written.ends_with(row.old_name))
      findings_.warnings.push_back(fmt::format("{} is called {} now, and is read as that", written, row.key));
  }

  void note(const std::string& key, const Json& value, const char* reason) {
    notes_.push_back({key, show_json(value, 200), true, Verdict::no_meaning, reason});
  }

  bool is_removed(const std::string& key, const Json& value) {
    for (const auto& removed : removed_settings()) {
      if (removed.key != key) continue;
      const Json off = json_of(removed.off);
      // {"enabled": false, ...} is off whatever else it has.
      const bool is_off = std::find(off.begin(), off.end(), value) != off.end() ||
                          (value.is_object() && value.contains("enabled") && value["enabled"] == false);
      if (is_off && !removed_are_errors_) note(key, value, "it is off, and gone since DeepSpeed 0.19.7");
      else
        problem("'{}' is {}: DeepSpeed 0.19.7 has removed it{}; {}", key, show_json(value),
                is_off ? ", and refuses it also where it is off" : "", removed.instead);
      return true;
    }
    return false;
  }

  void refuse_unknown(const std::string& section, const std::string& written, const std::string& name) {
    std::vector<std::string> names;
    for (const auto& row : setting_rows())
      if (section_of(row) == section && applies(row))
        for (const char* other : {row.key, row.other_name, row.old_name})
          if (other) names.push_back(last_part(other));
    for (const auto& other : setting_sections())
      if (const std::string key = other.key;
          !key.empty() && (section.empty() ? key.find('.') == key.npos : key.starts_with(section + ".")))
        names.push_back(last_part(other.key));
    const auto nearest = nearest_name(name, names);
    const std::string suggestion = nearest ? fmt::format("; did you mean {}?", joined_key(section, *nearest)) : "";
    if (section == "optimizer.params")
      problem("'{}' is no parameter of {}{}", show_key(written), settings_.optimizer->type, suggestion);
    else if (section == "scheduler.params")
      problem("'{}' is no parameter of {}{}", show_key(written), settings_.scheduler->type, suggestion);
    else
      problem("'{}' is no setting of DeepSpeed's{}{}", show_key(written), suggestion,
              nearest ? "" : "; remove it, or let its name begin with _ if it is a note");
  }
  static std::string show_key(const std::string& key) {
    const std::string text = show_json(Json(key), 120);
    return text.substr(1, text.size() - (text.ends_with('"') ? 2 : 1));
  }

  /// Reads a value into its place.
  void take(const Row& row, Found& found) {
    const Section& section = *section_called(section_of(row));
    const Json& node = *found.node;
    const bool is_type = row.types == nullptr && last_part(row.key) == "type" && row.place && applies(row) &&
                         (section_of(row) == "optimizer" || section_of(row) == "scheduler");
    if (is_type) return;  // read_types() has seen it
    if (node == "auto" && section.classed) {
      found.absent = true;
      return;
    }
    if (node == "auto" && !takes_auto(row)) {
      found.absent = true;
      return problem(
          "'{}' is \"auto\", and nothing has filled it; write a value, or let prepare() fill it (DummyOptim and "
          "DummyScheduler for their sections, a loader for batch sizes)",
          found.written);
    }
    std::string expected;
    auto read = read_value(row, section, node, expected);
    if (!read) {
      found.absent = true;
      return problem("'{}' is {}, expected {}", found.written, shown(row, node, 60), expected);
    }
    if (!read->warning.empty()) findings_.warnings.push_back(std::move(read->warning));
    found.value = std::move(read->value);
    if (found.value.is_null() && row.nullable) found.absent = true;
    if (row.place) set_place(row.place(settings_), found.value);
    if (row.since && is_before(options_.as_of_version, row.since))
      findings_.warnings.push_back(
          fmt::format("{} came with DeepSpeed {}, but as_of_version is {}: it is read all the same", found.written,
                      row.since, options_.as_of_version));
  }

  void translate_older_keys(GivenKeys& keys) {
    auto& zero = settings_.zero_optimization;
    const auto flag = [&](const char* name) {
      const auto found = given_.find(row_called("zero_optimization", name));
      return found != given_.end() && found->second.value == true;
    };
    if (stage_of_flag_) zero.stage = *stage_of_flag_;
    if (const auto found = given_.find(row_called("", "allgather_size")); found != given_.end()) {
      if (stage_of_flag_) zero.allgather_bucket_size = found->second.value.get<int64_t>();
      else
        problem(
            "'allgather_size' is read only beside \"zero_optimization\": true; write "
            "zero_optimization.allgather_bucket_size");
    }
    const auto moved_on = [&](const char* old, const char* section, std::string& device) {
      if (!keys.contains(std::string("zero_optimization.") + old)) return;
      if (sections_.contains(std::string("zero_optimization.") + section))
        problem("'zero_optimization.{}' is the old name of 'zero_optimization.{}', and both are there; remove it", old,
                section);
      if (flag(old)) {
        device = "cpu";
        keys.insert(fmt::format("zero_optimization.{}.device", section));
        findings_.warnings.push_back(
            fmt::format("zero_optimization.{} is called {}.device: \"cpu\" now, and is read as that", old, section));
      }
    };
    moved_on("cpu_offload", "offload_optimizer", zero.offload_optimizer.device);
    moved_on("cpu_offload_param", "offload_param", zero.offload_param.device);
    if (flag("stage3_gather_fp16_weights_on_model_save")) zero.gather_16bit_weights_on_model_save = true;
  }

  void check_needed(const GivenKeys& keys) {
    for (const auto& row : setting_rows())
      if (row.needed && applies(row) && !keys.contains(row.key) && !mentioned(row.key))
        problem("'{}' is missing; {} needs it", row.key, settings_.scheduler->type);
  }
  /// A problem says something of the key already.
  bool mentioned(const std::string& key) const {
    return std::any_of(findings_.problems.begin(), findings_.problems.end(),
                       [&](const std::string& text) { return text.starts_with("'" + key + "'"); });
  }

  Json default_of(const Row& row) { return row.place ? value_at(row.place(defaults_)) : json_of(row.fallback); }

  /// Refuses what is not here, unless it would change nothing.
  void check_state(const Row& row, const Found& found) {
    if (row.state != SettingState::later && row.state != SettingState::refused) return;
    const Json value = row.place ? value_at(row.place(settings_)) : found.value;
    if (value.is_null() || value == default_of(row)) return;
    const Json fine = row.fine ? json_of(row.fine) : Json::array();
    if (std::find(fine.begin(), fine.end(), value) != fine.end()) return;
    if (row.idle && row.idle(settings_, options_)) return;
    const char* reason = reason_of(row);
    const std::string text = shown(row, value, 60);
    if (row.state == SettingState::refused) problem("'{}' is {}, which is not here: {}", found.written, text, reason);
    else
      findings_.later.push_back(
          fmt::format("'{}' is {}, which is not in this version: {}", found.written, text, reason));
  }

  static const char* reason_of(const Row& row) {
    if (row.reason) return row.reason;
    const Section* section = section_called(section_of(row));
    return section && section->reason ? section->reason : "";
  }

  void end_with_findings() {
    const auto end = [](std::vector<std::string>& lines) {
      constexpr size_t kMost = 20;
      if (lines.size() > kMost) {
        const size_t more = lines.size() - kMost;
        lines.resize(kMost);
        lines.push_back(fmt::format("and {} more", more));
      }
      raise<ConfigError>("DeepSpeed configuration: {}", fmt::join(lines, "\n  "));
    };
    if (!findings_.problems.empty()) end(findings_.problems);
    if (options_.later_is_error && !findings_.later.empty()) end(findings_.later);
  }

  void list_effective() {
    for (const auto& row : setting_rows()) {
      if (!applies(row)) {
        if (std::string_view(row.key) == "optimizer.type" || std::string_view(row.key) == "scheduler.type")
          settings_.effective.push_back({section_of(row), "null", false, Verdict::acts, ""});
        continue;
      }
      const auto found = given_.find(&row);
      Entry entry{.key = row.key};
      entry.given = found != given_.end() && !document_.of_fields;
      const Json value = row.place               ? value_at(row.place(settings_))
                         : found != given_.end() ? found->second.value
                                                 : json_of(row.fallback);
      entry.value = shown(row, value, 200);
      if (row.place && std::holds_alternative<std::optional<double>*>(row.place(settings_)) && value.is_number() &&
          std::isinf(value.get<double>()))
        entry.value = "Infinity";
      if (std::string_view(row.key) == "steps_per_print" && entry.value == "Infinity")
        entry.given = document_.gave_steps_per_print;
      const char* idle = row.idle ? row.idle(settings_, options_) : nullptr;
      if (idle || row.state == SettingState::no_meaning || row.state == SettingState::refused) {
        entry.verdict = Verdict::no_meaning;
        entry.reason = idle ? idle : row.state == SettingState::refused ? "it is off" : reason_of(row);
      }
      settings_.effective.push_back(std::move(entry));
    }
    if (document_.of_fields) return;
    settings_.effective.insert(settings_.effective.end(), notes_.begin(), notes_.end());
  }

  const DeepSpeedConfig::Document& document_;
  const ReadOptions& options_;
  const bool removed_are_errors_;
  ZeroSettings settings_, defaults_;
  std::map<const Row*, Found> given_;  ///< in the table's order
  std::set<std::string> sections_;
  std::vector<Entry> notes_;
  std::optional<int64_t> stage_of_flag_;  ///< "zero_optimization": true
  Findings findings_;
};

}  // namespace

std::vector<Entry> ZeroSettings::without_meaning() const {
  std::vector<Entry> entries;
  for (const auto& entry : effective)
    if (entry.given && entry.verdict == Verdict::no_meaning) entries.push_back(entry);
  return entries;
}

ZeroSettings read_settings(const DeepSpeedConfig& config, const ReadOptions& options) {
  return SettingsReader(config.document(), options).read();
}

std::string to_json(const ZeroSettings& settings) {
  ZeroSettings copy = settings;
  Json root = Json::object();
  for (const auto& row : setting_rows()) {
    const std::string_view key = row.key;
    if (!row.place || (key.starts_with("optimizer.") && !copy.optimizer) ||
        (key.starts_with("scheduler.") && !copy.scheduler))
      continue;
    Json* node = &root;
    const std::string section = section_of(row);
    for (size_t begin = 0; begin < section.size();) {
      const size_t end = std::min(section.find('.', begin), section.size());
      node = &(*node)[section.substr(begin, end - begin)];
      begin = end + 1;
    }
    Json value = value_at(row.place(copy));
    if (value.is_number_float() && !std::isfinite(value.get<double>())) value = "Infinity";
    (*node)[row.other_name ? row.other_name : last_part(row.key)] = std::move(value);
  }
  return root.dump();
}

}  // namespace accelerate::zero
