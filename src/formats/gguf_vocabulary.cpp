#include "formats/gguf_vocabulary.hpp"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "formats/gguf_writer.hpp"
#include "formats/tokenizer_settings.hpp"
#include "input/json.hpp"
#include "input/read_file.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

json byte_level(bool cuts) {
  return {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", cuts}};
}
json sequence(json first, json second) {
  return {{"type", "Sequence"}, {"pretokenizers", {std::move(first), std::move(second)}}};
}
json split_and_bytes(const char* pattern) {
  return sequence({{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}, {"invert", false}},
                  byte_level(false));
}

const std::vector<GgufPreTokenizer>& pre_tokenizers() {
  static const std::vector<GgufPreTokenizer> all = [] {
    const json digits = sequence({{"type", "Digits"}, {"individual_digits", true}}, byte_level(true));
    const json llama =
        split_and_bytes(R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
                        R"(\s*[\r\n]+|\s+(?!\S)|\s+)");
    const json qwen =
        split_and_bytes(R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
                        R"(\s*[\r\n]+|\s+(?!\S)|\s+)");
    return std::vector<GgufPreTokenizer>{{"smollm", digits, nullptr},
                                         {"starcoder", digits, nullptr},
                                         {"refact", digits, nullptr},
                                         {"command-r", digits, nullptr},
                                         {"gpt-2", byte_level(true), nullptr},
                                         {"phi-2", byte_level(true), nullptr},
                                         {"llama-bpe", llama, nullptr, /*whole_words=*/true, /*adds_bos=*/true},
                                         {"llama3", llama, nullptr, /*whole_words=*/true, /*adds_bos=*/true},
                                         {"llama-v3", llama, nullptr, /*whole_words=*/true, /*adds_bos=*/true},
                                         {"falcon3", llama, nullptr, /*whole_words=*/true, /*adds_bos=*/true},
                                         {"qwen2", qwen, json::object({{"type", "NFC"}})},
                                         {"deepseek-r1-qwen", qwen, nullptr},
                                         {"megrez", qwen, nullptr}};
  }();
  return all;
}

/// The steps of a pre_tokenizer, however it is written; nothing for one without bytes or with other steps.
std::optional<std::vector<std::string>> steps_of(const json& part) {
  const auto type = part.is_object() ? part.value("type", "") : "";
  if (type == "Sequence") {
    std::vector<std::string> steps;
    for (const auto& inner : part.at("pretokenizers")) {
      auto more = steps_of(inner);
      if (!more) return std::nullopt;
      std::ranges::move(*more, std::back_inserter(steps));
    }
    return steps;
  }
  if (type == "ByteLevel") {
    if (part.value("add_prefix_space", true)) return std::nullopt;
    return part.value("use_regex", true) ? std::vector<std::string>{"cut", "bytes"} : std::vector<std::string>{"bytes"};
  }
  if (type == "Digits") return std::vector<std::string>{part.value("individual_digits", false) ? "digit" : "digits"};
  if (type == "Split" && part.at("behavior") == "Isolated" && !part.value("invert", false) &&
      part.at("pattern").contains("Regex"))
    return std::vector<std::string>{"split " + part["pattern"]["Regex"].get<std::string>()};
  return std::nullopt;
}

json read_tokenizer_object(const fs::path& path) {
  std::string problem;
  auto value = parse_json<json>(read_text<CheckpointError>("", path, kMostListBytes), &problem);
  if (!value.is_object())
    raise<CheckpointError>("'{}': it is not a JSON object{}. It is probably truncated: copy or download it again.",
                           path.string(), problem.empty() ? "" : ": it " + problem);
  return value;
}

/// Two tokens with one space between them; spaces within tokens are written as another letter.
bool is_merge(std::string_view line) {
  return std::ranges::count(line, ' ') == 1 && line.front() != ' ' && line.back() != ' ';
}
constexpr const char* kNoMerge = "the merge '{}' is not of two tokens with one space between them. It is damaged.";

constexpr const char* kOtherwise =
    "Convert the model with llama.cpp's convert_hf_to_gguf.py and quantize its result, or choose nf4, fp4 or int8, "
    "which keep the folder's files";

/// tokenizer.json and what lies beside it, on the way into a GGUF file.
class VocabularyOfFolder {
 public:
  VocabularyOfFolder(const fs::path& folder, const json& config, int64_t rows, std::vector<std::string>& notes)
      : folder_(folder), path_(folder / "tokenizer.json"), config_(config), rows_(rows), notes_(notes) {
    if (!is_there(path_))
      raise<ConfigError>("'{}': it has no tokenizer.json, which the vocabulary of a .gguf file is made of{}. {}",
                         folder.string(),
                         is_there(folder / "tokenizer.model")
                             ? "; its tokenizer.model is SentencePiece's, of which there is no conversion"
                             : " (transformers writes one: AutoTokenizer.from_pretrained(IN).save_pretrained(IN))",
                         kOtherwise);
    root_ = read_tokenizer_object(path_);
    settings_ = read_tokenizer_settings(folder, root_);
  }

  std::vector<std::string> entries() {
    try {
      check_kind();
      read_tokens();
      for (const auto& [key, name] : {std::pair("bos", "bos"), {"eos", "eos"}, {"unknown", "unk"}, {"padding", "pad"}})
        if (const auto id = id_of(name)) ids_.emplace(key, *id);
      if (root_.contains("post_processor")) read_around(root_["post_processor"]);
      put("model", "gpt2");
      put("pre", pre_tokenizer());
      put("tokens", std::move(tokens_));
      put("token_type", std::move(kinds_));
      put("merges", merges());
    } catch (const json::exception& error) {
      fail("a field is not of the form that the format has: {}", error.what());
    }
    for (const auto& [key, id] : ids_) put(key + "_token_id", static_cast<uint32_t>(id));
    put("add_bos_token", adds_bos_);
    put("add_eos_token", adds_eos_);
    if (!settings_.chat_template.empty())
      entries_.push_back(gguf_entry("tokenizer.chat_template", settings_.chat_template));
    return std::move(entries_);
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("tokenizer '{}': {}", path_.string(), fmt::format(what, std::forward<Args>(args)...));
  }
  void put(const std::string& key, const GgufEntryValue& value) {
    entries_.push_back(gguf_entry("tokenizer.ggml." + key, value));
  }

  void check_kind() const {
    const auto& model = root_.at("model");
    const auto kind = model.value("type", "BPE");
    const bool other_bytes = model.value("byte_fallback", false);
    if (kind != "BPE" || other_bytes)
      raise<ConfigError>(
          "tokenizer '{}': its vocabulary is of the kind {}{}, expected byte-level BPE, as GPT-2, LLaMA 3, Qwen2 and "
          "SmolLM have it: no other is converted. {}",
          path_.string(), kind.substr(0, 100), other_bytes ? " with byte_fallback (SentencePiece's)" : "", kOtherwise);
    for (const char* field : {"unk_token", "continuing_subword_prefix", "end_of_word_suffix", "dropout"})
      if (model.contains(field) && !model[field].is_null() && model[field] != "")
        raise<ConfigError>("tokenizer '{}': the model's {} is {}, expected none: a .gguf file has no place for it. {}",
                           path_.string(), field, show_json(model[field]), kOtherwise);
  }

  std::string pre_tokenizer() const {
    const auto given = root_.contains("pre_tokenizer") ? root_["pre_tokenizer"] : json();
    const auto normalizer = root_.contains("normalizer") ? root_["normalizer"] : json();
    const bool whole_words = root_.at("model").value("ignore_merges", false);
    if (const auto steps = steps_of(given))
      for (const auto& known : pre_tokenizers())
        if (steps_of(known.pre_tokenizer) == steps && known.normalizer == normalizer &&
            known.whole_words == whole_words)
          return known.name;
    raise<ConfigError>(
        "tokenizer '{}': it cuts text in a way that has no name in .gguf files here (pre_tokenizer {}, normalizer {}, "
        "ignore_merges {}), expected that of one of {}. {}",
        path_.string(), show_json(given, 300), show_json(normalizer), whole_words, gguf_pre_tokenizer_names(),
        kOtherwise);
  }

  void put_token(const std::string& token, const json& id, GgufTokenKind kind) {
    const auto place = whole_number(id).value_or(-1);
    if (place < 0 || place >= rows_)
      fail("the token '{}' has the id {}, and the embeddings have {} rows. Is it of another model?",
           token.substr(0, 100), show_json(id), rows_);
    tokens_[static_cast<size_t>(place)] = token;
    kinds_[static_cast<size_t>(place)] = static_cast<int32_t>(kind);
  }

  void read_tokens() {
    for (int64_t id = 0; id < rows_; ++id) tokens_.push_back(fmt::format("[PAD{}]", id));
    kinds_.assign(static_cast<size_t>(rows_), static_cast<int32_t>(GgufTokenKind::unused));
    for (const auto& [token, id] : root_.at("model").at("vocab").items()) put_token(token, id, GgufTokenKind::normal);
    std::unordered_map<std::string, int64_t> ids;
    for (size_t id = 0; id < tokens_.size(); ++id)
      if (kinds_[id] != static_cast<int32_t>(GgufTokenKind::unused)) ids.emplace(tokens_[id], id);
    std::vector<PlacedToken> given;
    if (!settings_.known_class)
      for (const auto& token : root_.value("added_tokens", json::array())) {
        const auto id = whole_number(token.at("id"));
        if (!id) fail("an added token has the id {}, expected a whole number.", show_json(token["id"]));
        given.push_back(
            {{token.at("content").get<std::string>(), token.value("special", false), token.value("lstrip", false),
              token.value("rstrip", false), false, token.value("single_word", false)},
             *id});
      }
    const auto id_of = [&](const std::string& token) {
      const auto found = ids.find(token);
      return found == ids.end() ? std::nullopt : std::optional(found->second);
    };
    const auto size = static_cast<int64_t>(ids.size()), of_json = std::ssize(given);
    std::vector<std::string> particular;
    const auto placed = place_tokens(settings_, std::move(given), id_of, size, path_.string());
    for (size_t i = 0; i < placed.size(); ++i) {
      const auto& token = placed[i].token;
      const auto id = placed[i].id;
      // A token that no file names, but a class, may have no row.
      if (id >= rows_ && !token.id && std::cmp_greater_equal(i, of_json)) continue;
      put_token(token.content, id, token.special ? GgufTokenKind::control : GgufTokenKind::user_defined);
      for (const auto& [flag, is_set] :
           {std::pair("lstrip", token.strip_left), {"rstrip", token.strip_right}, {"single_word", token.single_word}})
        if (is_set) particular.push_back(fmt::format("{} of '{}'", flag, token.content));
    }
    if (!particular.empty())
      notes_.push_back(fmt::format("A .gguf file has no place for {}: white space beside such tokens becomes tokens.",
                                   fmt::join(particular, ", ")));
  }

  std::vector<std::string> merges() const {
    std::vector<std::string> lines;
    for (const auto& merge : root_.at("model").at("merges"))
      lines.push_back(merge.is_array() ? merge.at(0).get<std::string>() + " " + merge.at(1).get<std::string>()
                                       : merge.get<std::string>());
    for (const auto& line : lines)
      if (!is_merge(line)) fail(kNoMerge, line.substr(0, 100));
    return lines;
  }

  /// The number of a special token, as tokenizer_config.json spells it or config.json counts it.
  std::optional<int64_t> id_of(const std::string& name) const {
    if (const auto named = settings_.named.find(name + "_token"); named != settings_.named.end()) {
      const auto found = std::ranges::find(tokens_, named->second);
      return found == tokens_.end() ? std::nullopt : std::optional<int64_t>(found - tokens_.begin());
    }
    const auto counted = config_.find(name + "_token_id");
    if (counted == config_.end()) return std::nullopt;
    const auto id = whole_number(counted->is_array() && !counted->empty() ? counted->front() : *counted);
    return id && *id >= 0 && *id < rows_ ? id : std::nullopt;
  }

  /// The tokens that the post-processor puts around a text.
  void read_around(const json& part) {
    const auto type = part.is_null() ? "ByteLevel" : part.at("type").get<std::string>();
    if (type == "ByteLevel") return;
    if (type == "Sequence") {
      for (const auto& inner : part.at("processors")) read_around(inner);
      return;
    }
    const char* side = "bos";
    for (const auto& item : type == "TemplateProcessing" ? part.at("single") : json::array({nullptr})) {
      if (item.is_object() && item.contains("Sequence")) {
        side = "eos";
        continue;
      }
      const auto ids = item.is_object() ? part.at("special_tokens")
                                              .at(item.at("SpecialToken").at("id").get<std::string>())
                                              .at("ids")
                                              .get<std::vector<int64_t>>()
                                        : std::vector<int64_t>();
      auto& adds = side == std::string_view("bos") ? adds_bos_ : adds_eos_;
      if (ids.size() != 1 || adds || ids_.try_emplace(side, ids[0]).first->second != ids[0])
        raise<ConfigError>(
            "tokenizer '{}': its post_processor is {}, expected at most bos_token before a text and eos_token after "
            "it, which is what a .gguf file can ask for. {}",
            path_.string(), show_json(part, 300), kOtherwise);
      adds = true;
    }
  }

  fs::path folder_, path_;
  const json& config_;
  int64_t rows_;
  std::vector<std::string>& notes_;
  json root_;
  TokenizerSettings settings_;
  std::vector<std::string> tokens_, entries_;
  std::vector<int32_t> kinds_;
  std::map<std::string, int64_t> ids_;
  bool adds_bos_ = false, adds_eos_ = false;
};

/// The vocabulary in a GGUF file's metadata, on the way into files.
class VocabularyOfGguf {
 public:
  VocabularyOfGguf(const GgufMetadata& metadata, const std::string& file) : metadata_(metadata), file_(file) {}

  std::map<std::string, std::string> files() const {
    const auto* tokens = list("tokens");
    const auto* merges = list("merges");
    const auto* cuts = find_gguf_pre_tokenizer(text("tokenizer.ggml.pre"));
    // The token of a space before the text depends on where the space is put.
    const bool known = cuts && text("tokenizer.ggml.model") == "gpt2" && !flag("add_space_prefix", false);
    if (!tokens || !merges || !known) return {};
    std::map<std::string, std::string> files{{"tokenizer.json", dump(tokenizer(*tokens, *merges, *cuts))},
                                             {"tokenizer_config.json", dump(settings(*tokens))},
                                             {"generation_config.json", dump(generation())}};
    if (const auto chat = text("tokenizer.chat_template"); !chat.empty()) files["chat_template.jinja"] = chat;
    return files;
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("GGUF file '{}': {}", file_, fmt::format(what, std::forward<Args>(args)...));
  }
  std::string text(const std::string& key) const {
    const auto* found = metadata_.find_as<std::string>(key);
    return found ? *found : std::string();
  }
  const std::vector<std::string>* list(const std::string& key) const {
    return metadata_.find_as<std::vector<std::string>>("tokenizer.ggml." + key);
  }
  bool flag(const std::string& key, bool missing) const {
    const auto* found = metadata_.find_as<bool>("tokenizer.ggml." + key);
    return found ? *found : missing;
  }
  std::optional<int64_t> id(const std::string& name) const {
    return metadata_.integer("tokenizer.ggml." + name + "_token_id");
  }
  std::string token(int64_t id, const std::vector<std::string>& tokens) const {
    if (id < 0 || id >= static_cast<int64_t>(tokens.size()))
      fail("a special token has the id {}, and there are {} tokens. It is damaged.", id, tokens.size());
    return tokens[static_cast<size_t>(id)];
  }
  std::string dump(const json& value) const {
    try {
      return value.dump(2) + "\n";
    } catch (const json::exception& error) {
      fail("its vocabulary has a token that is no UTF-8: {}. It is damaged.", error.what());
    }
  }

  json tokenizer(const std::vector<std::string>& tokens, const std::vector<std::string>& merges,
                 const GgufPreTokenizer& cuts) const {
    const auto* kinds = metadata_.find_as<std::vector<int64_t>>("tokenizer.ggml.token_type");
    for (const auto& merge : merges)
      if (!is_merge(merge)) fail(kNoMerge, merge.substr(0, 100));
    json vocab = json::object(), added = json::array();
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto kind =
          kinds && kinds->size() == tokens.size() ? static_cast<GgufTokenKind>((*kinds)[i]) : GgufTokenKind::normal;
      if (kind == GgufTokenKind::unused) continue;
      if (!vocab.emplace(tokens[i], i).second)
        fail("its vocabulary has the token '{}' twice. It is damaged.", tokens[i].substr(0, 100));
      if (kind == GgufTokenKind::control || kind == GgufTokenKind::user_defined)
        added.push_back({{"id", i},
                         {"content", tokens[i]},
                         {"single_word", false},
                         {"lstrip", false},
                         {"rstrip", false},
                         {"normalized", false},
                         {"special", kind == GgufTokenKind::control}});
    }
    json decoder = byte_level(true);
    decoder["add_prefix_space"] = true;
    return {{"version", "1.0"},
            {"truncation", nullptr},
            {"padding", nullptr},
            {"added_tokens", std::move(added)},
            {"normalizer", cuts.normalizer},
            {"pre_tokenizer", cuts.pre_tokenizer},
            {"post_processor", around(tokens, cuts)},
            {"decoder", std::move(decoder)},
            {"model",
             {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", nullptr},
              {"continuing_subword_prefix", nullptr},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", cuts.whole_words},
              {"vocab", std::move(vocab)},
              {"merges", merges}}}};
  }

  /// Special tokens that are put around a text.
  json around(const std::vector<std::string>& tokens, const GgufPreTokenizer& cuts) const {
    const auto bos = flag("add_bos_token", cuts.adds_bos) ? id("bos") : std::nullopt;
    const auto eos = flag("add_eos_token", false) ? id("eos") : std::nullopt;
    if (!bos && !eos)
      return {{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", false}, {"use_regex", true}};
    json special = json::object();
    const auto text = [&](const char* which, int64_t type) {
      json items = json::array();
      const auto add = [&](const std::optional<int64_t>& id) {
        if (!id) return;
        const auto name = token(*id, tokens);
        special[name] = {{"id", name}, {"ids", json::array({*id})}, {"tokens", json::array({name})}};
        items.push_back({{"SpecialToken", {{"id", name}, {"type_id", type}}}});
      };
      add(bos);
      items.push_back({{"Sequence", {{"id", which}, {"type_id", type}}}});
      add(eos);
      return items;
    };
    json single = text("A", 0), pair = single;
    for (auto& item : text("B", 1)) pair.push_back(item);
    return {{"type", "TemplateProcessing"}, {"single", single}, {"pair", pair}, {"special_tokens", special}};
  }

  json settings(const std::vector<std::string>& tokens) const {
    json settings{{"tokenizer_class", "PreTrainedTokenizerFast"}, {"clean_up_tokenization_spaces", false}};
    for (const auto& [name, key] :
         {std::pair("bos_token", "bos"), {"eos_token", "eos"}, {"unk_token", "unknown"}, {"pad_token", "padding"}})
      if (const auto number = id(key)) settings[name] = token(*number, tokens);
    if (const auto length = metadata_.integer(text("general.architecture") + ".context_length"))
      settings["model_max_length"] = *length;
    return settings;
  }

  /// Answers end with any of the tokens that the file says end something.
  json generation() const {
    json generation = json::object();
    if (const auto number = id("bos")) generation["bos_token_id"] = *number;
    if (const auto number = id("padding")) generation["pad_token_id"] = *number;
    std::vector<int64_t> ends;
    for (const char* name : {"eos", "eot", "eom"})
      if (const auto number = id(name); number && std::ranges::find(ends, *number) == ends.end())
        ends.push_back(*number);
    if (ends.size() == 1) generation["eos_token_id"] = ends[0];
    else if (!ends.empty()) generation["eos_token_id"] = ends;
    return generation;
  }

  const GgufMetadata& metadata_;
  const std::string& file_;
};

}  // namespace

const GgufPreTokenizer* find_gguf_pre_tokenizer(const std::string& name) {
  const auto found = std::ranges::find(pre_tokenizers(), name, &GgufPreTokenizer::name);
  return found == pre_tokenizers().end() ? nullptr : &*found;
}

std::string gguf_pre_tokenizer_names() {
  std::vector<std::string> names;
  for (const auto& known : pre_tokenizers()) names.push_back(known.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

std::vector<std::string> gguf_vocabulary(const fs::path& folder, const json& config, int64_t rows,
                                         std::vector<std::string>& notes) {
  return VocabularyOfFolder(folder, config, rows, notes).entries();
}

std::map<std::string, std::string> tokenizer_files(const GgufMetadata& metadata, const std::string& file) {
  return VocabularyOfGguf(metadata, file).files();
}

}  // namespace accelerate::formats
