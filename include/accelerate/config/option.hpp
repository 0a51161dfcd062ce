#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

/// Every setting once. The tables behind these functions feed the argument parsers, the help texts, the completions and
/// the manual page of the program, the reading of config files, the environment of started processes, and
/// docs/settings.md.
namespace accelerate::config {

/// How the text of a flag becomes a value.
enum class Kind {
  text,
  integer,
  number,    ///< floating point
  flag,      ///< takes no value: given means true
  unset,     ///< takes no value: given means false for the setting that it names
  boolean,   ///< yes/no, true/false, on/off, 1/0 (y, n, t, f too)
  truth,     ///< the reference's type=bool: any text is true, even "False"; only "" is false
  booleans,  ///< three of them, with commas
  append,    ///< may be given several times
  words,     ///< takes all words up to the next flag
};

/// How a value is written into the environment of the started processes.
enum class Form { none, text, lower };

/// A setting's value when nobody gives one, of the type that config files would have it in. Lists refer to constants.
using Default = std::variant<std::monostate, bool, int64_t, double, std::string_view, std::span<const bool>,
                             std::span<const std::string_view>>;

/// One setting: a row, written with designated initialisers, that says only what differs from these defaults.
struct Option {
  const char* name;  ///< its name in programs: the key of config files, the member that holds it
  Kind kind;
  Default fallback{};             ///< nothing: it has no value unless somebody gives one
  const char* choices = nullptr;  ///< "a|b|c"; nullptr: any value of its kind
  const char* value = nullptr;    ///< the value's name in help: N, FILE, ...; nullptr for flags
  const char* help = "";          ///< one sentence, no full stop
  const char* flags = nullptr;    ///< comma-separated when they are not --name; "" for what only config files have;
                                  ///< without dashes: a positional argument
  /// Its section in config files: "" at the top, else a nested key; nullptr: not in config files.
  const char* section = nullptr;
  const char* variable = nullptr;  ///< of started processes, and read by the launcher where the flag isn't given
  Form form = Form::none;
  bool required = false;
  bool takes_auto = false;     ///< config files and variables may say "auto": whoever uses it decides
  const char* bare = nullptr;  ///< the meaning of the flag alone, where its value is optional (and attached by '=')

  /// Every spelling, each also with '-' for '_': "--num_processes", "--num-processes".
  std::vector<std::string> spellings() const;
  bool has_default() const { return !std::holds_alternative<std::monostate>(fallback); }
  /// The default as JSON, which is how help and docs show it; "" without one.
  std::string default_text() const;
  bool positional() const { return flags && *flags && *flags != '-'; }
  bool takes_value() const { return kind != Kind::flag && kind != Kind::unset; }
  std::vector<std::string> choice_list() const;
};

/// Options under one heading of the help.
struct OptionGroup {
  const char* title;
  std::span<const Option> options;
};

struct CommandTable {
  const char* name;  ///< "launch", "config default", ...
  const char* summary;
  const char* usage;
  std::vector<OptionGroup> groups;

  const Option* find(std::string_view name) const;
};

/// `accelerate launch`: its 125 options of the reference, then ours, then what only config files hold.
const CommandTable& launch_table();
/// Keys of config files for Amazon SageMaker.
std::span<const Option> sagemaker_keys();
/// All commands, `launch` too.
const std::vector<CommandTable>& command_tables();
/// The title under which the launch table has what the reference doesn't.
inline constexpr const char* kAdditions = "Beyond the reference";
/// The title under which it has what older versions of the reference had: it is accepted, with a remark, and does
/// nothing.
inline constexpr const char* kRetired = "Retired";

/// Nested keys of config files that stand for a setting of another name (older versions, and what the reference's own
/// questions write).
struct Alias {
  const char* section;
  const char* key;
  const char* name;
};
std::span<const Alias> aliases();

}  // namespace accelerate::config
