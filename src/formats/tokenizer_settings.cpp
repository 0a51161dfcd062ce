#include "formats/tokenizer_settings.hpp"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // tokens without an id of their own get theirs in the order of the files

constexpr const char* kEnd = "<|endoftext|>";
using Around = TokenizerClass::Around;
constexpr TokenizerClass kRoberta{
    "RobertaTokenizer",       "<s>", "</s>", "<unk>", "<pad>", "gpt-2", /*composes=*/false, Around::cls_and_sep,
    /*plain_specials=*/false, "<s>", "</s>", "<mask>"};
constexpr TokenizerClass kClasses[] = {
    {"GPT2Tokenizer", kEnd, kEnd, kEnd, nullptr, "gpt-2"},
    {"CodeGenTokenizer", kEnd, kEnd, kEnd, nullptr, "gpt-2"},
    {"GPTNeoXTokenizer", kEnd, kEnd, kEnd, "<|padding|>", "gpt-2", /*composes=*/true, Around::bos_and_eos},
    {"Qwen2Tokenizer", nullptr, kEnd, kEnd, kEnd, "qwen2", /*composes=*/true, Around::of_tokenizer_json,
     /*plain_specials=*/true},
    kRoberta};

constexpr TokenizerClass kBert{
    "BertTokenizer",          nullptr, nullptr, "[UNK]", "[PAD]", nullptr, /*composes=*/false, Around::cls_and_sep,
    /*plain_specials=*/false, "[CLS]", "[SEP]", "[MASK]"};
/// Classes that cut text as BERT's does, and the types of models whose folders need not name a class.
constexpr const char* kBertClasses[] = {
    "BertTokenizer",       "DistilBertTokenizer",  "ElectraTokenizer",           "ConvBertTokenizer",
    "MobileBertTokenizer", "SqueezeBertTokenizer", "LayoutLMTokenizer",          "LxmertTokenizer",
    "RetriBertTokenizer",  "RealmTokenizer",       "DPRContextEncoderTokenizer", "DPRQuestionEncoderTokenizer",
    "DPRReaderTokenizer"};
constexpr const char* kBertModels[] = {"",           "bert",        "distilbert",    "electra",    "convbert",
                                       "mobilebert", "squeezebert", "layoutlm",      "lxmert",     "retribert",
                                       "realm",      "dpr",         "megatron-bert", "nomic_bert", "visual_bert"};

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
                                             {"roberta", "RobertaTokenizer"},
                                             {"bart", "RobertaTokenizer"},
                                             {"longformer", "RobertaTokenizer"},
                                             {"phi", "GPT2Tokenizer"},
                                             {"codegen", "GPT2Tokenizer"},
                                             {"starcoder2", "GPT2Tokenizer"},
                                             {"gpt_neox", "GPTNeoXTokenizer"},
                                             {"qwen2_moe", "Qwen2Tokenizer"},
                                             {"qwen2", "Qwen2Tokenizer", true},
                                             {"qwen3", "Qwen2Tokenizer"},
                                             {"qwen3_moe", "Qwen2Tokenizer"},
                                             {"phi3", "TokenizersBackend", true},
                                             {"olmo2", "TokenizersBackend", true},
                                             {"granite", "TokenizersBackend", true},
                                             {"gpt_bigcode", "TokenizersBackend", true},
                                             {"mistral", "TokenizersBackend", true},
                                             {"mixtral", "TokenizersBackend", true}};

constexpr const char *kList = "extra_special_tokens", *kOldList = "additional_special_tokens";
constexpr const char* kNamed[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

/// A token as a file has it.
struct Said {
  TokenSetting token;
  bool is_text = false;       ///< and no object with flags
  bool of_an_object = false;  ///< of tokenizer_config.json

  /// Whether transformers takes one for the other: text is no object.
  bool operator==(const Said& other) const { return token == other.token && is_text == other.is_text; }
};

/// The files, on the way into settings.
class TokenizerFiles {
 public:
  TokenizerFiles(const fs::path& folder, const nlohmann::json& tokenizer_json, TokenizerKind kind)
      : folder_(folder), path_(folder / "tokenizer_config.json"), kind_(kind), tokenizer_json_(tokenizer_json) {
    if (is_there(path_)) config_ = read_object(path_);
  }

  TokenizerSettings read() {
    try {
      find_class();
      check_files();
      read_names();
      if (config_.contains("added_tokens_decoder")) {
        read_decoder(config_["added_tokens_decoder"]);
      } else {  // as versions before 4.34 wrote it
        if (const auto map = folder_ / "special_tokens_map.json"; is_there(map)) merge(read_object(map), map);
        if (const auto added = folder_ / "added_tokens.json"; is_there(added)) read_added(read_object(added), added);
        if (tokenizer_json_.is_object())
          for (const auto& value : tokenizer_json_.value("added_tokens", nlohmann::json::array()))
            put_added(id_of(value.at("id"), folder_ / "tokenizer.json", "of its added_tokens"), token(Json(value)));
      }
      if (!list_) list_ = old_list_.value_or(std::vector<Said>());
      fill_in();
      order();
      result_.add_bos = flag("add_bos_token");
      result_.add_eos = flag("add_eos_token");
      result_.add_prefix_space = flag("add_prefix_space");
      result_.split_special_tokens = flag("split_special_tokens");
      read_chat_template();
    } catch (const nlohmann::detail::exception& error) {
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
    if (kind_ == TokenizerKind::word_piece) return expect_bert(name, model_type);
    if (name == "BartTokenizer") name = kRoberta.name;  // which it is
    const auto of_model = std::ranges::find(kClassesOfModels, model_type, &ClassOfModel::model_type);
    if (of_model != std::end(kClassesOfModels) && (name.empty() || of_model->wins)) name = of_model->class_name;
    result_.class_name = name;
    // A folder that says nothing at all is of the time when only GPT-2 had such files.
    const bool silent = name.empty() && model_type.empty() && !is_there(folder_ / "tokenizer.json");
    const auto found = std::ranges::find(kClasses, silent ? "GPT2Tokenizer" : std::string_view(name),
                                         [](const TokenizerClass& known) { return std::string_view(known.name); });
    if (found != std::end(kClasses)) result_.known_class = &*found;
  }

  void expect_bert(const std::string& name, const std::string& model_type) {
    const auto is_one_of = [](const auto& names, const std::string& one) {
      return std::ranges::find(names, one) != std::end(names);
    };
    if (name.empty() ? !is_one_of(kBertModels, model_type) : !is_one_of(kBertClasses, name))
      fail(
          "it is {} '{}', expected BertTokenizer or one that cuts text as that does ({}). Use its own in Python, or "
          "name BertTokenizer (tokenizer_class) if the model was trained with that.",
          name.empty() ? "of the model_type" : "of the class", name.empty() ? model_type : name,
          fmt::join(kBertClasses, ", "));
    result_.class_name = name;
    result_.known_class = &kBert;
  }

  void check_files() const {
    if (const auto files = config_.find("fast_tokenizer_files");
        files != config_.end() && !files->empty() && *files != Json::array({"tokenizer.json"}))
      fail(
          "fast_tokenizer_files names {}, of which transformers takes the one for its own version. Keep that one, as "
          "tokenizer.json, and remove the field.",
          show_json(*files));
  }

  /// An object with flags. @param special  whatever it says
  static TokenSetting token(const Json& value, bool special = false) {
    TokenSetting token{.content = value.at("content").get<std::string>()};
    token.special = special || value.value("special", false);
    token.strip_left = value.value("lstrip", false);
    token.strip_right = value.value("rstrip", false);
    token.single_word = value.value("single_word", false);
    if (value.contains("normalized")) token.normalized = value["normalized"].get<bool>();
    return token;
  }
  static Said text_token(const std::string& content) {
    return {.token = {.content = content, .special = true}, .is_text = true};
  }
  static bool is_token(const Json& value) { return value.is_string() || value.contains("content"); }
  Said said(const std::string& name, const Json& value, const fs::path& file) const {
    const bool of_config = file == path_;
    if (value.is_string()) return text_token(value.get<std::string>());
    if (!is_token(value))
      raise<CheckpointError>("tokenizer '{}': {} is {}, expected a token: its text, or an object with its content.",
                             file.string(), name, show_json(value));
    return {.token = token(value, !of_config), .of_an_object = of_config};
  }
  std::vector<Said> said_list(const std::string& name, const Json& values, const fs::path& file) const {
    std::vector<Said> list;
    if (values.is_null()) return list;
    if (!values.is_array())
      raise<CheckpointError>("tokenizer '{}': {} is {}, expected a list of tokens.", file.string(), name,
                             show_json(values));
    for (const auto& value : values) list.push_back(said(name, value, file));
    return list;
  }

  // --- what each file says

  using Names = std::vector<std::pair<std::string, Said>>;
  static Said& entry(Names& names, const std::string& name) {
    const auto there = std::ranges::find(names, name, &Names::value_type::first);
    return there != names.end() ? there->second : names.emplace_back(name, Said()).second;
  }
  static bool is_one_of_seven(const std::string& name) { return std::ranges::find(kNamed, name) != std::end(kNamed); }
  void put_own(const Json& names, const fs::path& file) {
    for (const auto& [name, value] : names.items()) {
      if (is_one_of_seven(name) && value.is_null()) named_[name] = std::nullopt;
      else entry(own_of_config_, name) = said(name, value, file);
    }
  }

  void read_names() {
    for (const auto& [name, value] : config_.items()) {
      const bool tagged = value.is_object() && value.value("__type", Json()) == "AddedToken";
      if (is_one_of_seven(name))
        named_[name] = value.is_null() ? std::nullopt : std::optional(said(name, value, path_));
      else if (name.ends_with("_token") && value.is_string()) entry(own_of_config_, name) = said(name, value, path_);
      else if (name.ends_with("_token") && tagged) entry(own_, name) = said(name, value, path_);
    }
    const auto list = config_.find(kList), old_list = config_.find(kOldList);
    const bool has_list = list != config_.end();
    const bool said_something = has_list && (list->is_object() || list->is_array() ? !list->empty() : !list->is_null());
    if (old_list != config_.end()) {
      auto tokens = said_list(kOldList, *old_list, path_);
      (said_something ? old_list_ : list_).emplace(std::move(tokens));
    }
    if (!has_list || (!said_something && list_)) return;
    if (list->is_object()) put_own(*list, path_);
    else list_ = said_list(kList, *list, path_);
  }

  /// special_tokens_map.json wins over tokenizer_config.json, except that lists are joined, that its list by the old
  /// name is of no account beside any other, and that a model's own names stay those of tokenizer_config.json.
  void merge(const Json& map, const fs::path& file) {
    for (const auto& [name, value] : map.items()) {
      if (is_one_of_seven(name)) {
        named_[name] = value.is_null() ? std::nullopt : std::optional(said(name, value, file));
      } else if (name == kOldList) {
        old_list_ = said_list(name, value, file);
      } else if (name == kList && value.is_object()) {
        list_.reset();
        put_own(value, file);
      } else if (name == kList) {
        if (!list_ || value.is_null()) list_.emplace();
        for (auto& one : said_list(name, value, file))
          if (std::ranges::find(*list_, one) == list_->end()) list_->push_back(std::move(one));
      } else if (name.ends_with("_token") && is_token(value)) {
        entry(own_, name) = said(name, value, file);
      } else if (value.is_null()) {
        std::erase_if(own_, [&](const auto& one) { return one.first == name; });
      }
    }
  }

  void put_added(int64_t id, TokenSetting one) {
    one.id = id;
    by_content_[one.content] = one;
    added_[id] = std::move(one);
  }
  void read_decoder(const Json& decoder) {
    for (const auto& [id, value] : decoder.items()) {
      const bool number =
          !id.empty() && id.size() < 10 && std::ranges::all_of(id, [](char c) { return c >= '0' && c <= '9'; });
      if (!number) fail("added_tokens_decoder has the id '{}', expected a whole number.", id.substr(0, 100));
      put_added(std::stoll(id), token(value));
    }
  }
  template <class AnyJson> static int64_t id_of(const AnyJson& id, const fs::path& path, const std::string& whose) {
    const auto number = whole_number(id);
    if (!number)
      raise<CheckpointError>("tokenizer '{}': a token {} has the id {}, expected a whole number. It is damaged.",
                             path.string(), whose, show_json(id));
    return *number;
  }
  void read_added(const Json& tokens, const fs::path& path) {
    std::set<std::string> special;
    const auto see = [&](const Said& one) {
      if (!one.of_an_object) special.insert(one.token.content);
    };
    for (const auto& [name, one] : named_)
      if (one) see(*one);
    for (const auto& one : list_.value_or(std::vector<Said>())) see(one);
    for (const auto& [content, id] : tokens.items()) {
      const bool is_special = special.contains(content);
      put_added(id_of(id, path, fmt::format("'{}'", content.substr(0, 100))),
                {.content = content, .special = is_special, .normalized = !is_special});
    }
  }

  // --- what follows of them

  /// Tokens that no file names, but the class, or the padding of tokenizer.json; and added tokens that a name stands
  /// for.
  void fill_in() {
    for (auto& [name, one] : named_)
      if (one)
        if (const auto added = by_content_.find(one->token.content); added != by_content_.end())
          *one = {.token = added->second};
    if (const auto* known = result_.known_class) {
      for (const auto& [name, content] : {std::pair("bos_token", known->bos),
                                          {"eos_token", known->eos},
                                          {"unk_token", known->unk},
                                          {"sep_token", known->sep},
                                          {"pad_token", known->pad},
                                          {"cls_token", known->cls},
                                          {"mask_token", known->mask}})
        if (content) named_.try_emplace(name, text_token(content));
    } else if (tokenizer_json_.is_object()) {
      const auto padding = tokenizer_json_.find("padding");
      if (padding != tokenizer_json_.end() && padding->is_object() && padding->contains("pad_token"))
        named_.try_emplace("pad_token", text_token(padding->at("pad_token").get<std::string>()));
    }
  }

  /// Added tokens by their ids, then those that a name stands for, then the rest.
  void order() {
    std::vector<std::pair<std::string, Said>> named;
    for (const char* name : kNamed)
      if (const auto found = named_.find(name); found != named_.end() && found->second)
        named.emplace_back(name, *found->second);
    for (const auto* own : {&own_, &own_of_config_})
      for (const auto& [name, one] : *own) entry(named, name) = one;

    std::set<std::string> contents, of_names;
    std::vector<Said> tokens;
    const auto* known = result_.known_class;
    if (!known && tokenizer_json_.is_object())
      for (const auto& value : tokenizer_json_.value("added_tokens", nlohmann::json::array()))
        contents.insert(value.at("content").get<std::string>());
    for (const auto& [id, one] : added_) {
      tokens.push_back({.token = one});
      contents.insert(one.content);
    }
    const auto add = [&](const Said& one) {
      const bool there = contents.contains(one.token.content) || std::ranges::find(tokens, one) != tokens.end();
      if (!there && !one.token.content.empty()) tokens.push_back(one);
    };
    for (const auto& [name, one] : named) {
      add(one);
      if (one.token.content.empty()) continue;
      of_names.insert(one.token.content);
      result_.named[name] = one.token.content;
    }
    for (const auto& one : *list_) add(one);
    for (auto& [one, is_text, of_an_object] : tokens) {
      one.special = one.special || of_names.contains(one.content);
      result_.tokens.push_back(std::move(one));
    }
    if (known && known->plain_specials) {
      const auto again = [&](const Said& one) {
        if (const auto& content = one.token.content; !content.empty()) result_.tokens.push_back({content, true});
      };
      for (const auto& [name, one] : named) again(one);
      for (const auto& one : *list_) again(one);
    }
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
  TokenizerKind kind_;
  const nlohmann::json& tokenizer_json_;
  Json config_ = Json::object();
  std::map<std::string, std::optional<Said>> named_;  ///< of the seven that all tokenizers have; nothing: null
  Names own_, own_of_config_;                         ///< a model's own; the latter win
  std::optional<std::vector<Said>> list_, old_list_;  ///< without a name; the latter where there is no list
  std::map<int64_t, TokenSetting> added_;
  std::map<std::string, TokenSetting> by_content_;
  TokenizerSettings result_;
};

}  // namespace

TokenizerSettings read_tokenizer_settings(const fs::path& folder, const nlohmann::json& tokenizer_json,
                                          TokenizerKind kind) {
  return TokenizerFiles(folder, tokenizer_json, kind).read();
}

std::vector<PlacedToken> place_tokens(const TokenizerSettings& settings, std::vector<PlacedToken> placed,
                                      const std::function<std::optional<int64_t>(const std::string&)>& id_of,
                                      int64_t next, const std::string& source) {
  const auto check = [&](const TokenSetting& token, int64_t said, int64_t id, bool there) {
    if (said != id)
      raise<CheckpointError>(
          "tokenizer '{}': its files give the token '{}' the id {}, and {}. transformers gives it the latter, and "
          "which of them the model was trained with can't be known here. Correct the files.",
          source, token.content.substr(0, 100), said,
          there ? fmt::format("in the vocabulary it is {}", id) : fmt::format("the next free one is {}", id));
  };
  std::map<std::string, size_t> places;
  for (const auto& one : placed) {
    const auto [place, is_new] = places.emplace(one.token.content, places.size());
    const auto there = is_new ? id_of(one.token.content) : placed[place->second].id;
    check(one.token, one.id, there.value_or(next), there.has_value());
    if (!there) ++next;
  }
  for (const auto& token : settings.tokens) {
    const auto [place, is_new] = places.emplace(token.content, placed.size());
    const auto there = is_new ? id_of(token.content) : placed[place->second].id;
    const auto id = there.value_or(next);
    if (!there) ++next;
    check(token, token.id.value_or(id), id, there.has_value());
    if (is_new) {
      placed.push_back({token, id, token.is_normalized()});
      continue;
    }
    auto& [before, its_id, once_normalized] = placed[place->second];
    const bool special = before.special || token.special, normalized = token.is_normalized();
    before = token;
    before.special = special;
    before.normalized = normalized;
    once_normalized = once_normalized || normalized;
  }
  return placed;
}

}  // namespace accelerate::formats
