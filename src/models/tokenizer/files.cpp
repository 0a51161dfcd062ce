#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>

#include "accelerate/formats/gguf.hpp"
#include "formats/gguf_vocabulary.hpp"
#include "formats/tokenizer_settings.hpp"
#include "models/json_file.hpp"
#include "models/tokenizer/content.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;
using formats::GgufTokenKind;
using nlohmann::json;

SplitStep digits(bool individual) { return {Pattern(individual ? R"(\p{N})" : R"(\p{N}+)")}; }

template <class... Args>
[[noreturn]] void refuse_file(const fs::path& path, fmt::format_string<Args...> what, Args&&... args) {
  raise<CheckpointError>("tokenizer '{}': {}", path.string(), fmt::format(what, std::forward<Args>(args)...));
}

json read_json(const fs::path& path) {
  std::string problem;
  auto value = parse_json<json>(read_text_file(path), &problem);
  if (!value.is_object())
    refuse_file(path, "it is not a JSON object{}. It is probably truncated: copy or download it again.",
                problem.empty() ? "" : ": it " + problem);
  return value;
}

/// Ids may leave gaps, as special tokens at round numbers do; but a few tokens must not ask for memory of millions.
void add_tokens(const json& vocabulary, const fs::path& path, std::vector<std::string>& tokens) {
  const auto most = static_cast<int64_t>(vocabulary.size()) + kMostGaps;
  if (!vocabulary.is_object()) refuse_file(path, "its vocabulary is no object from tokens to ids. It is damaged.");
  for (const auto& [token, id] : vocabulary.items()) {
    const auto place = whole_number(id).value_or(-1);
    if (place < 0 || place >= most)
      refuse_file(path, "the token '{}' has the id {}, expected 0 to {} for {} tokens. It is damaged.",
                  token.substr(0, 100), show_json(id), most - 1, vocabulary.size());
    if (static_cast<size_t>(place) >= tokens.size()) tokens.resize(static_cast<size_t>(place) + 1);
    tokens[static_cast<size_t>(place)] = token;
  }
}

int64_t id_in(const json& id, const fs::path& path) {
  const auto number = whole_number(id);
  if (!number) refuse_file(path, "a token has the id {}, expected a whole number. It is damaged.", show_json(id));
  return *number;
}

/// tokenizer.json, a piece at a time. The json library's own exceptions say what has a wrong type.
class TokenizerJson {
 public:
  /// @param root  what such a file has, or some of it
  TokenizerJson(fs::path path, json root) : path_(std::move(path)), root_(std::move(root)) {}

  TokenizerParts read() {
    // A misspelt field would be left out, and the ids be others.
    static const std::set<std::string> known = {"version",        "truncation", "padding",
                                                "added_tokens",   "normalizer", "pre_tokenizer",
                                                "post_processor", "decoder",    "model"};
    for (const auto& [name, value] : root_.items())
      if (!known.contains(name))
        refuse_file(path_, "it has a field '{}', and the format has {} only. Is it misspelt, or of a newer version?",
                    name.substr(0, 100), fmt::join(known, ", "));
    if (root_.contains("version") && root_["version"] != "1.0")
      refuse_file(path_, "it is of version {}, expected \"1.0\".", show_json(root_["version"], 100));
    try {
      read_model();
      for (const auto& token : root_.value("added_tokens", json::array())) read_added(token);
      read_steps();
      if (root_.contains("post_processor")) read_post_processors(root_["post_processor"]);
      if (root_.contains("decoder")) check_decoder(root_["decoder"]);
    } catch (const json::exception& error) {
      refuse_file(path_, "a field is not of the form that the format has: {}", error.what());
    }
    // Each goes over all of a text.
    constexpr size_t kMostSteps = 100;
    if (const size_t steps = parts_.normalizers.size() + parts_.pre_tokenizers.size(); steps > kMostSteps)
      refuse_file(path_, "it has {} normalizers and pre-tokenizers, expected at most {}. It is damaged.", steps,
                  kMostSteps);
    if (!cuts_bytes_) unsupported("without ByteLevel, the pre-tokenizer", root_.value("pre_tokenizer", json()));
    return std::move(parts_);
  }

  /// Only how text is cut.
  TokenizerParts read_cutting() {
    read_steps();
    return std::move(parts_);
  }

 private:
  void read_steps() {
    if (root_.contains("normalizer")) read_normalizer(root_["normalizer"]);
    if (root_.contains("pre_tokenizer")) read_pre_tokenizer(root_["pre_tokenizer"]);
  }
  [[noreturn]] void unsupported(const std::string& what, const json& found) const {
    refuse_file(path_, "{} {} is not supported; this is a byte-level BPE tokenizer. {}, and give a model the ids.",
                what, show_json(found, 200),
                found == "WordPiece" ? "Encode with WordPieceTokenizer, which reads such a folder"
                                     : "Encode with the Python package tokenizers");
  }
  static std::string type_of(const json& part) { return part.at("type").get<std::string>(); }

  void read_model() {
    const auto& model = root_.at("model");
    // Files of old don't name it; of these only a Unigram's vocabulary is a list.
    const bool is_list = model.contains("vocab") && model["vocab"].is_array();
    if (const auto type = model.value("type", is_list ? "Unigram" : "BPE"); type != "BPE")
      unsupported("the model", type);
    if (model.contains("unk_token") && !model["unk_token"].is_null())
      parts_.unk = model["unk_token"].get<std::string>();
    parts_.fuse_unk = model.value("fuse_unk", false);
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix", "dropout"})
      if (model.contains(field) && !model[field].is_null() && model[field] != "")
        unsupported(std::string("the model's ") + field, model[field]);
    if (model.value("byte_fallback", false)) unsupported("the model's byte_fallback", true);
    parts_.whole_words = model.value("ignore_merges", false);
    add_tokens(model.at("vocab"), path_, parts_.tokens);
    parts_.merges.reserve(model.at("merges").size());
    for (const auto& merge : model.at("merges")) {
      if (merge.is_array()) {
        parts_.merges.emplace_back(merge.at(0).get<std::string>(), merge.at(1).get<std::string>());
        continue;
      }
      const auto& line = merge.get_ref<const std::string&>();
      const auto space = line.find(' ');
      if (space == std::string::npos)
        refuse_file(path_, "the merge '{}' has no space between its parts. It is damaged.", line.substr(0, 100));
      parts_.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
    }
  }
  void read_added(const json& token) {
    parts_.added.push_back({token.at("content").get<std::string>(), id_in(token.at("id"), path_),
                            token.value("special", false), token.value("lstrip", false), token.value("rstrip", false),
                            token.value("normalized", false), token.value("single_word", false)});
  }
  static Pattern read_pattern(const json& pattern) {
    return pattern.contains("Regex") ? Pattern(pattern["Regex"].get<std::string>())
                                     : Pattern::literal(pattern.at("String").get<std::string>());
  }
  SplitBehavior read_behavior(const json& behavior, const json& part) const {
    const std::map<std::string, SplitBehavior> behaviors = {{"Isolated", SplitBehavior::isolated},
                                                            {"Removed", SplitBehavior::removed},
                                                            {"Contiguous", SplitBehavior::contiguous},
                                                            {"MergedWithPrevious", SplitBehavior::merged_with_previous},
                                                            {"MergedWithNext", SplitBehavior::merged_with_next}};
    const auto found = behaviors.find(behavior.get<std::string>());
    if (found == behaviors.end()) unsupported("the pre-tokenizer", part);
    return found->second;
  }
  void read_normalizer(const json& part) {
    if (part.is_null()) return;
    const std::map<std::string, NormalForm> forms = {
        {"NFC", NormalForm::nfc}, {"NFD", NormalForm::nfd}, {"NFKC", NormalForm::nfkc}, {"NFKD", NormalForm::nfkd}};
    if (type_of(part) == "Sequence") {
      for (const auto& inner : part.at("normalizers")) read_normalizer(inner);
    } else if (const auto form = forms.find(type_of(part)); form != forms.end()) {
      parts_.normalizers.emplace_back(form->second);
    } else if (type_of(part) == "Replace") {
      Replacement replacement{read_pattern(part.at("pattern")), part.at("content").get<std::string>()};
      // At the beginning of a text the package puts it in twice, or fails.
      if (replacement.pattern.can_be_empty() && !replacement.content.empty())
        unsupported("with a pattern that matches places between characters, the normalizer", part);
      parts_.normalizers.emplace_back(std::move(replacement));
    } else {
      unsupported("the normalizer", part);
    }
  }
  void read_pre_tokenizer(const json& part) {
    if (part.is_null()) return;
    const auto type = type_of(part);
    if (type == "Sequence") {
      for (const auto& inner : part.at("pretokenizers")) read_pre_tokenizer(inner);
    } else if (type == "ByteLevel") {
      if (cuts_bytes_) unsupported("behind ByteLevel, the pre-tokenizer", part);  // it would spell spelt bytes
      cuts_bytes_ = true;
      if (part.value("add_prefix_space", true)) parts_.pre_tokenizers.emplace_back(PrefixSpace{});
      if (part.value("use_regex", true)) parts_.pre_tokenizers.emplace_back(SplitStep{Pattern(kGpt2Pattern)});
    } else if (type == "Digits") {
      add_step(digits(part.value("individual_digits", false)));
    } else if (type == "Split") {
      add_step(
          {read_pattern(part.at("pattern")), read_behavior(part.at("behavior"), part), part.value("invert", false)});
    } else if (type == "Punctuation") {
      add_step({Pattern(R"([!-\/:-@\[-`{-~\p{P}])"), read_behavior(part.value("behavior", json("Isolated")), part)});
    } else {
      unsupported("the pre-tokenizer", part);
    }
  }
  void add_step(SplitStep step) {
    step.spelt = cuts_bytes_;
    parts_.pre_tokenizers.emplace_back(std::move(step));
  }
  // A text, on its way through the post-processors: what lies around it, in pieces as the package has them.
  static constexpr int64_t kText = -1;
  using Pieces = std::vector<std::vector<int64_t>>;

  void read_post_processors(const json& part) {
    Pieces pieces = {{kText}};
    read_post_processor(part, pieces);
    auto* around = &parts_.prefix;
    int64_t texts = 0;
    for (const auto& piece : pieces)
      for (const auto id : piece) {
        if (id != kText) around->push_back(id);
        else ++texts, around = &parts_.suffix;
      }
    if (texts != 1)
      refuse_file(path_, "its post_processor makes of a single text one that has it {} times, expected once: {}.",
                  texts, show_json(part, 300));
  }
  void read_post_processor(const json& part, Pieces& pieces) {
    constexpr int kMostProcessors = 100;  // each goes over all pieces
    if (++processors_ > kMostProcessors)
      refuse_file(path_, "it has more than {} post-processors. It is damaged.", kMostProcessors);
    if (part.is_null() || type_of(part) == "ByteLevel") return;
    if (type_of(part) == "Sequence") {
      for (const auto& inner : part.at("processors")) read_post_processor(inner, pieces);
    } else if (type_of(part) == "RobertaProcessing" || type_of(part) == "BertProcessing") {
      const auto cls = id_in(part.at("cls").at(1), path_), sep = id_in(part.at("sep").at(1), path_);
      for (size_t i = 0; i < pieces.size(); ++i) {
        if (i == 0) pieces[i].insert(pieces[i].begin(), cls);
        else if (type_of(part) == "RobertaProcessing") pieces[i].insert(pieces[i].begin(), sep);
        pieces[i].push_back(sep);
      }
    } else if (type_of(part) == "TemplateProcessing") {
      pieces = filled_in(part, pieces);
    } else {
      unsupported("the post-processor", part);
    }
  }
  /// Each item of a template is a piece; a text with what an earlier template has put around it counts as one text.
  Pieces filled_in(const json& part, const Pieces& pieces) const {
    if (pieces.size() > 2)
      unsupported(fmt::format("behind another that makes {} pieces of a text, where a template takes 1 or 2, the "
                              "post-processor",
                              pieces.size()),
                  part);
    Pieces made;
    for (const auto& item : part.at(pieces.size() == 1 ? "single" : "pair")) {
      if (item.contains("Sequence")) {
        const bool is_second = item["Sequence"].value("id", "A") == "B";
        if (is_second && pieces.size() == 1) unsupported("with $B in its template of a single text, the", part);
        made.push_back(pieces[is_second]);
        continue;
      }
      auto& piece = made.emplace_back();
      const auto& known = part.at("special_tokens");
      for (const auto& id : known.at(item.at("SpecialToken").at("id").get<std::string>()).at("ids"))
        piece.push_back(id_in(id, path_));
    }
    return made;
  }
  void check_decoder(const json& part) const {
    if (part.is_null() || type_of(part) == "ByteLevel") return;
    if (type_of(part) != "Sequence") unsupported("the decoder", part);
    for (const auto& inner : part.at("decoders")) check_decoder(inner);
  }

  fs::path path_;
  json root_;
  TokenizerParts parts_;
  bool cuts_bytes_ = false;  ///< ByteLevel was there
  int processors_ = 0;
};

/// transformers sets it as tokenizer_config.json does, in tokenizers of a class that it knows.
void set_prefix_space(json& part, bool value) {
  if (!part.is_object()) return;
  if (part.value("type", "") == "ByteLevel") part["add_prefix_space"] = value;
  if (part.contains("pretokenizers") && part["pretokenizers"].is_array())
    for (auto& inner : part["pretokenizers"]) set_prefix_space(inner, value);
}

/// The two files of GPT-2 and its kin, cut as the folder's class of tokenizers cuts.
TokenizerParts read_vocabulary(const fs::path& vocab, const fs::path& merges, const formats::TokenizerClass& known,
                               bool prefix_space) {
  auto cuts = formats::find_gguf_pre_tokenizer(known.cuts)->pre_tokenizer;
  set_prefix_space(cuts, prefix_space);
  const auto normalizer = known.composes ? json::object({{"type", "NFC"}}) : json();
  auto parts = TokenizerJson(vocab, {{"normalizer", normalizer}, {"pre_tokenizer", cuts}}).read_cutting();
  add_tokens(read_json(vocab), vocab, parts.tokens);
  const auto text = read_text_file(merges);
  // A merge takes some hundred bytes: lines have 8 and more.
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  if (const size_t most = 500'000 + text.size() / 8; lines > most)
    refuse_file(merges, "it has {} lines, expected at most {} in {} bytes. It is damaged.", lines, most, text.size());
  parts.merges.reserve(lines + 1);
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    auto line = text.substr(begin, end - begin);
    if (line.ends_with('\r')) line.pop_back();
    const bool comment = begin == 0 && line.starts_with("#version");
    begin = end + 1;
    const auto space = line.find(' ');
    if (line.empty() || comment) continue;
    if (space == std::string::npos)
      refuse_file(merges, "the line '{}' has no space between its parts. It is damaged.", line.substr(0, 100));
    parts.merges.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return parts;
}

/// Adds the tokens and settings of the files beside the vocabulary to it.
void apply(const formats::TokenizerSettings& settings, bool of_json, const fs::path& path, TokenizerParts& parts) {
  const auto* known = settings.known_class;
  std::vector<formats::PlacedToken> given;
  if (!known)  // else transformers adds what the settings have of them
    for (const auto& token : parts.added)
      given.push_back(
          {{token.content, token.special, token.strip_left, token.strip_right, token.single_word, token.normalized},
           token.id,
           token.normalized});
  std::unordered_map<std::string_view, int64_t> ids;  // of the vocabulary, of which most folders need nothing
  const auto find = [&](const std::string& token) -> std::optional<int64_t> {
    for (size_t id = ids.empty() ? 0 : parts.tokens.size(); id < parts.tokens.size(); ++id)
      ids.emplace(parts.tokens[id], static_cast<int64_t>(id));
    const auto found = ids.find(token);
    return found == ids.end() || token.empty() ? std::nullopt : std::optional(found->second);
  };
  const auto size = std::ssize(parts.tokens) - std::ranges::count(parts.tokens, std::string());
  std::map<std::string, int64_t> placed;
  parts.added.clear();
  for (const auto& [token, id, once_normalized] :
       formats::place_tokens(settings, std::move(given), find, size, path.string())) {
    placed[token.content] = id;
    parts.added.push_back({token.content, id, token.special, token.strip_left, token.strip_right, token.is_normalized(),
                           token.single_word, once_normalized});
  }
  const auto id_of = [&](const char* name) {
    const auto found = settings.named.find(name);
    return found == settings.named.end() ? std::nullopt : std::optional<int64_t>(placed.at(found->second));
  };
  parts.bos = id_of("bos_token");
  parts.eos = id_of("eos_token");
  parts.pad = id_of("pad_token");
  using Around = formats::TokenizerClass::Around;
  const auto around = known ? known->around : Around::of_tokenizer_json;
  if (around != Around::of_tokenizer_json) parts.prefix.clear(), parts.suffix.clear();
  if (around == Around::cls_and_sep) {
    const auto cls = id_of("cls_token"), sep = id_of("sep_token");
    if (!cls || !sep)
      refuse_file(
          path,
          "it is of the class {}, which puts cls_token before a text and sep_token after it, and one of them is "
          "null. Give tokenizer_config.json both.",
          settings.class_name);
    parts.prefix = {*cls};
    parts.suffix = {*sep};
  } else if (!of_json) {
    if (parts.bos && settings.add_bos) parts.prefix = {*parts.bos};
    if (parts.eos && settings.add_eos) parts.suffix = {*parts.eos};
  }
  parts.split_special_tokens = settings.split_special_tokens;
  parts.chat_template = settings.chat_template;
}

/// What was read, as it was, and the class in tokenizer_config.json: config.json may have said it, and is the model's.
/// @param tokenizer_json  the file that stands for it; empty: there is none
std::map<std::string, std::string> files_of(const formats::TokenizerSettings& settings, const fs::path& folder,
                                            const fs::path& tokenizer_json) {
  std::map<std::string, std::string> files;
  if (!tokenizer_json.empty()) files.emplace("tokenizer.json", read_text_file(tokenizer_json));
  for (const std::string name : kTokenizerFiles)
    if (name != "tokenizer.json" && is_there(folder / name)) files.emplace(name, read_text_file(folder / name));
  auto& text = files["tokenizer_config.json"];
  auto config = text.empty() ? nlohmann::ordered_json::object() : parse_json<nlohmann::ordered_json>(text);
  const std::string name = settings.known_class          ? settings.known_class->name
                           : settings.class_name.empty() ? "PreTrainedTokenizerFast"
                                                         : settings.class_name;
  auto& said = config["tokenizer_class"];
  if (said != name && said != name + "Fast") {
    said = name;
    text = config.dump(2) + "\n";
  }
  return files;
}

TokenizerParts read_gguf(const fs::path& path) {
  const GgufFile file(path);
  const auto& metadata = file.metadata();
  const auto text = [&](const char* key) {
    const auto* value = metadata.find_as<std::string>(key);
    return value ? *value : std::string();
  };
  const auto* tokens = metadata.find_as<std::vector<std::string>>("tokenizer.ggml.tokens");
  const auto* merges = metadata.find_as<std::vector<std::string>>("tokenizer.ggml.merges");
  if (!tokens) refuse_file(path, "it has no vocabulary (tokenizer.ggml.tokens).");
  if (text("tokenizer.ggml.model") != "gpt2" || !merges)
    refuse_file(path,
                "its vocabulary is of the kind '{}', expected 'gpt2', byte-level BPE with merges. Use "
                "another tokenizer, such as the sentencepiece library.",
                text("tokenizer.ggml.model"));
  TokenizerParts parts;
  parts.decodes_added = false;  // by llama.cpp
  parts.tokens = *tokens;
  for (const auto& merge : *merges) {
    const auto space = merge.find(' ', 1);
    if (space == std::string::npos)
      refuse_file(path, "the merge '{}' has no space between its parts. It is damaged.", merge.substr(0, 100));
    parts.merges.emplace_back(merge.substr(0, space), merge.substr(space + 1));
  }
  if (const auto* kinds = metadata.find_as<std::vector<int64_t>>("tokenizer.ggml.token_type");
      kinds && kinds->size() == tokens->size()) {
    for (size_t id = 0; id < kinds->size(); ++id)
      if (const auto kind = static_cast<GgufTokenKind>((*kinds)[id]);
          kind == GgufTokenKind::control || kind == GgufTokenKind::user_defined)
        parts.added.push_back({(*tokens)[id], static_cast<int64_t>(id), kind == GgufTokenKind::control});
  }
  const auto* cuts = formats::find_gguf_pre_tokenizer(text("tokenizer.ggml.pre"));
  if (!cuts)
    refuse_file(path,
                "its text is cut the way of '{}' (tokenizer.ggml.pre), expected one of {}. Use the model's "
                "tokenizer.json.",
                text("tokenizer.ggml.pre"), formats::gguf_pre_tokenizer_names());
  auto cutting =
      TokenizerJson(path, {{"normalizer", cuts->normalizer}, {"pre_tokenizer", cuts->pre_tokenizer}}).read_cutting();
  parts.normalizers = std::move(cutting.normalizers);
  parts.pre_tokenizers = std::move(cutting.pre_tokenizers);
  const auto* prefix_space = metadata.find_as<bool>("tokenizer.ggml.add_space_prefix");
  if (prefix_space && *prefix_space) parts.pre_tokenizers.insert(parts.pre_tokenizers.begin(), PrefixSpace{});
  parts.whole_words = cuts->whole_words;
  parts.bos = metadata.integer("tokenizer.ggml.bos_token_id");
  parts.eos = metadata.integer("tokenizer.ggml.eos_token_id");
  parts.pad = metadata.integer("tokenizer.ggml.padding_token_id");
  const auto asks_for = [&](const char* key, bool missing) {
    const auto* value = metadata.find_as<bool>(key);
    return value ? *value : missing;
  };
  if (parts.bos && asks_for("tokenizer.ggml.add_bos_token", cuts->adds_bos)) parts.prefix = {*parts.bos};
  if (parts.eos && asks_for("tokenizer.ggml.add_eos_token", false)) parts.suffix = {*parts.eos};
  parts.chat_template = text("tokenizer.chat_template");
  parts.files = [path = fs::absolute(path)] {
    auto files = formats::tokenizer_files(GgufFile(path).metadata(), path.string());
    files.erase("generation_config.json");  // of the model
    return files;
  };
  return parts;
}

}  // namespace

TokenizerParts read_tokenizer(const fs::path& path) {
  if (path.extension() == ".gguf") return read_gguf(path);
  const auto folder = is_folder(path) ? path : path.parent_path();
  const auto vocab = folder / "vocab.json", merges = folder / "merges.txt";
  TokenizerParts parts;
  const auto keep_files = [&](const formats::TokenizerSettings& settings, const fs::path& tokenizer_json) {
    parts.files = [files = files_of(settings, folder, tokenizer_json)] { return files; };
  };
  if (path.filename() != "vocab.json" && path.filename() != "merges.txt" &&
      (!is_folder(path) || is_there(folder / "tokenizer.json"))) {
    const auto file = is_folder(path) ? folder / "tokenizer.json" : path;
    auto root = read_json(file);
    const auto settings = formats::read_tokenizer_settings(folder, root);
    const auto* known = settings.known_class;
    if (known && root.contains("pre_tokenizer")) set_prefix_space(root["pre_tokenizer"], settings.add_prefix_space);
    parts = TokenizerJson(file, std::move(root)).read();
    apply(settings, /*of_json=*/true, path, parts);
    keep_files(settings, file);
  } else if (is_there(vocab) && is_there(merges)) {
    const auto settings = formats::read_tokenizer_settings(folder);
    const auto* known = settings.known_class;
    if (!known)
      refuse_file(path,
                  "it is of the class {}, which is not made of vocab.json and merges.txt here, expected GPT2Tokenizer, "
                  "CodeGenTokenizer, GPTNeoXTokenizer, Qwen2Tokenizer or RobertaTokenizer. Bring it into one file with "
                  "transformers: AutoTokenizer.from_pretrained(IN).save_pretrained(OUT), or name the class in "
                  "tokenizer_config.json (tokenizer_class).",
                  settings.class_name.empty() ? "that transformers has for this model_type" : settings.class_name);
    parts = read_vocabulary(vocab, merges, *known, settings.add_prefix_space);
    apply(settings, /*of_json=*/false, path, parts);
    keep_files(settings, {});
  } else {
    refuse_file(
        path,
        "the folder has neither tokenizer.json nor vocab.json with merges.txt. Copy the tokenizer's files beside the "
        "model.");
  }
  return parts;
}

}  // namespace accelerate::models
