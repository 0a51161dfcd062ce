#include "formats/tokenizer_settings.hpp"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "utils/json.hpp"
#include "utils/raise.hpp"
#include "utils/read_file.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // tokens without an id of their own get theirs in the order of the files

constexpr const char* kEnd = "<|endoftext|>";
constexpr TokenizerClass kClasses[] = {{"GPT2Tokenizer", kEnd, kEnd, kEnd, nullptr, "gpt-2"},
                                       {"CodeGenTokenizer", kEnd, kEnd, kEnd, nullptr, "gpt-2"},
                                       {"GPTNeoXTokenizer", kEnd, kEnd, kEnd, "<|padding|>", "gpt-2", true},
                                       {"Qwen2Tokenizer", nullptr, kEnd, kEnd, kEnd, "qwen2", true}};

/// Types of models whose folders need not name the class. For some, transformers goes by the type in any case: their
/// files name wrong ones.
struct ClassOfModel {
  const char *model_type, *class_name;
  bool wins = false;
};
constexpr ClassOfModel kClassesOfModels[] = {{"gpt2", "GPT2Tokenizer"},
                                             {"gptj", "GPT2Tokenizer"},
                                             {"gpt_neo", "GPT2Tokenizer"},
                                             {"opt", "GPT2Tokenizer"},
                                             {"phi", "GPT2Tokenizer"},
                                             {"codegen", "GPT2Tokenizer"},
                                             {"starcoder2", "GPT2Tokenizer"},
                                             {"gpt_neox", "GPTNeoXTokenizer"},
                                             {"qwen2_moe", "Qwen2Tokenizer"},
                                             {"qwen2", "Qwen2Tokenizer", true},
                                             {"qwen3", "Qwen2Tokenizer"},
                                             {"mistral", "TokenizersBackend", true},
                                             {"mixtral", "TokenizersBackend", true}};

constexpr const char* kNamed[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

/// The files, on the way into settings.
class Settings {
 public:
  explicit Settings(const fs::path& folder) : folder_(folder), path_(folder / "tokenizer_config.json") {
    if (is_there(path_)) config_ = read_object(path_);
  }

  TokenizerSettings read() {
    try {
      find_class();
      check_files();
      if (config_.contains("added_tokens_decoder")) {
        read_decoder(config_["added_tokens_decoder"]);
        read_named(config_);
      } else {  // as versions before 4.34 wrote it
        auto values = config_;
        if (const auto map = folder_ / "special_tokens_map.json"; is_there(map)) merge(read_object(map), values);
        read_named(values);
        if (const auto added = folder_ / "added_tokens.json"; is_there(added)) read_added(read_object(added), added);
      }
      order();
      result_.add_bos = flag("add_bos_token");
      result_.add_eos = flag("add_eos_token");
      result_.add_prefix_space = flag("add_prefix_space");
      result_.split_special_tokens = flag("split_special_tokens");
      read_chat_template();
    } catch (const Json::exception& error) {
      fail("a field is not of the form that transformers gives it: {}", error.what());
    }
    return std::move(result_);
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("tokenizer '{}': {}", path_.string(), fmt::format(what, std::forward<Args>(args)...));
  }
  static Json read_object(const fs::path& path) {
    std::string problem;
    auto value = parse_json<Json>(read_text<CheckpointError>("", path, kMostSettingsBytes), &problem);
    if (!value.is_object())
      raise<CheckpointError>(
          "tokenizer '{}': it is not a JSON object{}. It is probably truncated: copy or download it again.",
          path.string(), problem.empty() ? "" : ": it " + problem);
    return value;
  }
  bool flag(const char* key) const {
    const auto found = config_.find(key);
    if (found == config_.end() || found->is_null()) return false;
    if (!found->is_boolean()) fail("{} is {}, expected true or false.", key, show_json(*found));
    return found->get<bool>();
  }
  static std::string text(const Json& object, const char* key) {
    const auto found = object.find(key);
    return found == object.end() || !found->is_string() ? std::string() : found->get<std::string>();
  }

  void find_class() {
    auto name = text(config_, "tokenizer_class");
    std::string model_type;
    if (const auto model = folder_ / "config.json"; is_there(model)) {
      const auto config = read_object(model);
      if (name.empty()) name = text(config, "tokenizer_class");
      model_type = text(config, "model_type");
    }
    if (name.ends_with("Fast")) name.resize(name.size() - std::string_view("Fast").size());
    const auto of_model = std::ranges::find(kClassesOfModels, model_type, &ClassOfModel::model_type);
    if (of_model != std::end(kClassesOfModels) && (name.empty() || of_model->wins)) name = of_model->class_name;
    result_.class_name = name;
    // A folder that says nothing at all is of the time when only GPT-2 had such files.
    const bool silent = name.empty() && model_type.empty() && !is_there(folder_ / "tokenizer.json");
    const auto found = std::ranges::find(kClasses, silent ? "GPT2Tokenizer" : std::string_view(name),
                                         [](const TokenizerClass& known) { return std::string_view(known.name); });
    if (found != std::end(kClasses)) result_.known_class = &*found;
  }

  void check_files() const {
    if (const auto files = config_.find("fast_tokenizer_files");
        files != config_.end() && !files->empty() && *files != Json::array({"tokenizer.json"}))
      fail(
          "fast_tokenizer_files names {}, of which transformers takes the one for its own version. Keep that one, as "
          "tokenizer.json, and remove the field.",
          show_json(*files));
  }

  static TokenSetting token(const Json& value, bool special) {
    TokenSetting token{.special = special};
    if (value.is_string()) {
      token.content = value.get<std::string>();
      return token;
    }
    token.content = value.at("content").get<std::string>();
    token.special = special || value.value("special", false);
    token.strip_left = value.value("lstrip", false);
    token.strip_right = value.value("rstrip", false);
    token.single_word = value.value("single_word", false);
    token.normalized = value.value("normalized", !token.special);
    return token;
  }
  void read_decoder(const Json& decoder) {
    for (const auto& [id, value] : decoder.items()) {
      const bool number =
          !id.empty() && id.size() < 10 && std::ranges::all_of(id, [](char c) { return c >= '0' && c <= '9'; });
      if (!number) fail("added_tokens_decoder has the id '{}', expected a whole number.", id.substr(0, 100));
      auto one = token(value, false);
      one.id = std::stoll(id);
      added_.push_back(std::move(one));
    }
  }
  void read_added(const Json& tokens, const fs::path& path) {
    for (const auto& [content, id] : tokens.items()) {
      const auto number = whole_number(id);
      if (!number)
        raise<CheckpointError>("tokenizer '{}': the token '{}' has the id {}, expected a whole number. It is damaged.",
                               path.string(), content.substr(0, 100), show_json(id));
      const bool special = std::ranges::any_of(kNamed, [&](const char* name) { return is_named(name, content); }) ||
                           std::ranges::find(extra_, content, &TokenSetting::content) != extra_.end();
      added_.push_back({.content = content, .special = special, .normalized = !special, .id = *number});
    }
  }
  bool is_named(const std::string& name, const std::string& content) const {
    const auto found = named_.find(name);
    return found != named_.end() && found->second.content == content;
  }

  /// special_tokens_map.json wins over tokenizer_config.json, except that lists are joined, and that its list by the
  /// old name is of no account beside any other.
  static void merge(const Json& map, Json& values) {
    const auto extra = values.find("extra_special_tokens");
    const bool has_list =
        values.contains("additional_special_tokens") || (extra != values.end() && !extra->is_object());
    for (const auto& [key, value] : map.items()) {
      if (key == "additional_special_tokens" && has_list) continue;
      if (key == "extra_special_tokens" && value.is_array() && values[key].is_array())
        values[key].insert(values[key].end(), value.begin(), value.end());
      else values[key] = value;
    }
  }

  void read_named(const Json& values) {
    if (const auto* known = result_.known_class)
      for (const auto& [name, content] : {std::pair("bos_token", known->bos),
                                          {"eos_token", known->eos},
                                          {"unk_token", known->unk},
                                          {"pad_token", known->pad}})
        if (content) named_[name] = {.content = content, .special = true};
    const auto put = [&](const std::string& name, const Json& value) {
      if (value.is_null()) named_.erase(name);
      else named_[name] = token(value, true);
      if (std::ranges::find(kNamed, name) == std::end(kNamed)) others_.push_back(name);
    };
    for (const auto& [key, value] : values.items())
      if (key.ends_with("_token") && (value.is_string() || value.is_null() || value.contains("content")))
        put(key, value);
    const Json extra = values.value("extra_special_tokens", Json());
    if (extra.is_object())
      for (const auto& [key, value] : extra.items()) put(key, value);
    const Json list = extra.is_array() && !extra.empty() ? extra : values.value("additional_special_tokens", Json());
    if (list.is_array())
      for (const auto& value : list) extra_.push_back(token(value, true));
  }

  /// Added tokens by their ids, then those that a name stands for, then the rest.
  void order() {
    std::ranges::stable_sort(added_, {}, [](const TokenSetting& one) { return *one.id; });
    auto& tokens = result_.tokens;
    tokens = std::move(added_);
    const auto add = [&](const TokenSetting& one, bool is_named) {
      const auto there = std::ranges::find(tokens, one.content, &TokenSetting::content);
      if (there == tokens.end()) tokens.push_back(one);
      else if (is_named) there->special = true;
    };
    std::vector<std::string> names(std::begin(kNamed), std::end(kNamed));
    names.insert(names.end(), others_.begin(), others_.end());
    for (const auto& name : names)
      if (const auto found = named_.find(name); found != named_.end()) {
        if (found->second.content.empty()) continue;
        add(found->second, true);
        result_.named[name] = found->second.content;
      }
    for (const auto& one : extra_) add(one, false);
  }

  void read_chat_template() {
    if (const auto file = folder_ / "chat_template.jinja"; is_there(file)) {
      result_.chat_template = read_text<CheckpointError>("", file, kMostSettingsBytes);
      return;
    }
    const auto found = config_.find("chat_template");
    if (found == config_.end()) return;
    if (found->is_string()) result_.chat_template = found->get<std::string>();
    else if (found->is_object()) result_.chat_template = text(*found, "default");
    else if (found->is_array())  // several, by name
      for (const auto& one : *found)
        if (one.is_object() && one.value("name", "") == "default") result_.chat_template = text(one, "template");
  }

  fs::path folder_, path_;
  Json config_ = Json::object();
  std::vector<TokenSetting> added_, extra_;
  std::map<std::string, TokenSetting> named_;
  std::vector<std::string> others_;  ///< names of named_ that are a model's own, in order
  TokenizerSettings result_;
};

}  // namespace

TokenizerSettings read_tokenizer_settings(const fs::path& folder) { return Settings(folder).read(); }

std::vector<PlacedToken> place_tokens(const TokenizerSettings& settings,
                                      const std::function<std::optional<int64_t>(const std::string&)>& id_of,
                                      int64_t next, const std::string& source) {
  std::vector<PlacedToken> placed;
  for (const auto& token : settings.tokens) {
    const auto there = id_of(token.content);
    const auto id = there.value_or(next);
    if (!there) ++next;
    if (token.id.value_or(id) != id)
      raise<CheckpointError>(
          "tokenizer '{}': the files beside the vocabulary give the token '{}' the id {}, and {}. transformers gives "
          "it "
          "the latter, and which of them the model was trained with can't be known here. Correct the files.",
          source, token.content.substr(0, 100), *token.id,
          there ? fmt::format("in the vocabulary it is {}", id) : fmt::format("the next free one is {}", id));
    placed.push_back({&token, id});
  }
  return placed;
}

}  // namespace accelerate::formats
