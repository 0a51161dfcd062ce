#include "accelerate/models/wordpiece.hpp"

#include <algorithm>
#include <array>
#include <set>
#include <unordered_map>

#include <ATen/ops/empty.h>

#include "formats/tokenizer_settings.hpp"
#include "models/basic_tokenizer.hpp"
#include "models/json_file.hpp"
#include "models/piece_table.hpp"
#include "models/replaced.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kContinuation = "##";  // marks a piece that does not start a word
constexpr const char* kVocabFile = "vocab.txt";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr const char* kJsonFile = "tokenizer.json";

/// The replacements of clean_up_tokenization_spaces in a decoded text, one after the other.
constexpr std::pair<std::string_view, std::string_view> kCleanedUp[] = {
    {" .", "."},     {" ?", "?"},   {" !", "!"},   {" ,", ","},     {" ' ", "'"},
    {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};

int64_t code_points(std::string_view utf8) {
  return std::count_if(utf8.begin(), utf8.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

/// Lengths to which a pair of texts is cut so that together they have at most `room` tokens: the longer one gives
/// first.
std::pair<size_t, size_t> longest_first(size_t a, size_t b, size_t room) {
  if (a + b <= room) return {a, b};
  const bool swapped = a > b;
  size_t shorter = std::min(a, b);
  size_t longer = shorter > room ? shorter : std::max(shorter, room - shorter);
  if (shorter + longer > room) {
    shorter = room / 2;
    longer = room - shorter;
  }
  return swapped ? std::pair{longer, shorter} : std::pair{shorter, longer};
}

std::vector<std::string> lines_of(const fs::path& path) {
  const auto text = read_text_file(path);
  std::vector<std::string> vocabulary;
  // A token takes some hundred bytes, and a line one: vocabularies have 8 a line and more.
  const auto lines = static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
  if (const size_t most = 250'000 + text.size() / 8; lines > most)
    raise<CheckpointError>("'{}': it has {} lines, expected at most {} in {} bytes. It is damaged.", path.string(),
                           lines, most, text.size());
  vocabulary.reserve(lines + 1);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const bool carriage_return = end > begin && text[end - 1] == '\r';
    vocabulary.push_back(text.substr(begin, end - begin - (carriage_return ? 1 : 0)));
    begin = end + 1;
  }
  return vocabulary;
}

/// The vocabulary in the model of a tokenizer.json; the other parts are the folder's class's, as in transformers.
std::vector<std::string> vocabulary_of(const JsonFile& model, WordPieceOptions& options) {
  std::string type = "WordPiece", prefix(kContinuation);
  model.read("type", type);
  if (type != "WordPiece")
    model.fail("model.type", type, "\"WordPiece\"; byte-level BPE is read by Tokenizer::from_pretrained");
  model.read("continuing_subword_prefix", prefix);
  if (prefix != kContinuation) model.fail("model.continuing_subword_prefix", prefix, "\"##\"");
  model.read("max_input_chars_per_word", options.max_input_chars_per_word);
  const auto tokens = model.at("vocab");
  std::vector<std::string> vocabulary(tokens.root().size());
  for (const auto& [token, id] : tokens.root().items()) {
    const auto place = whole_number(id).value_or(-1);
    if (place < 0 || place >= std::ssize(vocabulary) || !vocabulary[static_cast<size_t>(place)].empty())
      model.fail("the id of the token '" + token.substr(0, 100) + "'", id,
                 fmt::format("one of 0 to {} for each of the tokens", vocabulary.size() - 1));
    vocabulary[static_cast<size_t>(place)] = token;
  }
  return vocabulary;
}

/// Reads the tokens that the files beside the vocabulary name, and add to it.
void read_special_tokens(const fs::path& folder, const nlohmann::json& tokenizer_json, WordPieceOptions& options,
                         std::vector<std::string>& vocabulary) {
  const auto refuse = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("tokenizer '{}': {}", folder.string(), fmt::format(what, std::forward<Args>(args)...));
  };
  const auto settings = formats::read_tokenizer_settings(folder, tokenizer_json, formats::TokenizerKind::word_piece);
  if (settings.split_special_tokens)
    refuse("split_special_tokens is true, expected false: special tokens that a text spells out are found as such.");
  std::unordered_map<std::string, int64_t> ids;
  for (int64_t id = 0; id < std::ssize(vocabulary); ++id) ids.emplace(vocabulary[static_cast<size_t>(id)], id);
  const auto find = [&](const std::string& token) {
    const auto found = ids.find(token);
    return found == ids.end() ? std::nullopt : std::optional(found->second);
  };
  const std::pair<const char*, std::string*> five[] = {{"unk_token", &options.unk_token},
                                                       {"cls_token", &options.cls_token},
                                                       {"sep_token", &options.sep_token},
                                                       {"pad_token", &options.pad_token},
                                                       {"mask_token", &options.mask_token}};
  std::set<std::string> named;
  bool all_there = true;  // else transformers adds them, and the model has no rows for what it adds
  for (const auto& [name, token] : five) {
    const auto found = settings.named.find(name);
    if (found == settings.named.end()) refuse("{} is null, expected a token of the vocabulary.", name);
    *token = found->second;
    named.insert(*token);
    all_there = all_there && find(*token);
  }
  if (!all_there) return;
  for (const auto& [token, id, once_normalized] :
       formats::place_tokens(settings, {}, find, std::ssize(vocabulary), folder.string())) {
    // White space beside them is none of a word's, so that lstrip and rstrip say nothing.
    if (!token.special || token.is_normalized() || once_normalized || token.single_word)
      refuse(
          "the added token '{}' is {}, expected one that is special and sought in the text as it is: here cleaned text "
          "is cut into words at once. Mark it so (special true, normalized false, single_word false) if the model was "
          "trained so, or encode in Python.",
          token.content.substr(0, 100),
          !token.special      ? "not special"
          : token.single_word ? "one for single words"
                              : "sought in cleaned text (normalized)");
    if (id == std::ssize(vocabulary)) vocabulary.push_back(token.content);
    if (!named.contains(token.content)) options.additional_special_tokens.push_back(token.content);
  }
}

}  // namespace

struct WordPieceTokenizer::Content {
  Content(std::vector<std::string> tokens, const WordPieceOptions& given)
      : options(given), vocabulary(std::move(tokens)) {
    const auto fail = []<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
      raise<CheckpointError>("WordPiece vocabulary: {}", fmt::format(what, std::forward<Args>(args)...));
    };
    if (vocabulary.empty()) fail("it is empty, expected one token a line. Is the file truncated?");
    ids.reserve(vocabulary.size());
    for (size_t id = 0; id < vocabulary.size(); ++id) {
      const auto& token = vocabulary[id];
      if (token.empty())
        fail("line {} is empty; the line number gives a token its id, so none can be left out. Is this a vocab.txt?",
             id + 1);
      if (const auto [first, fresh] = ids.emplace(token, static_cast<int64_t>(id)); !fresh)
        fail("the token '{}' is on line {} and on line {}; tokens must be unique. The file is damaged.", token,
             first->second + 1, id + 1);
    }
    std::vector<std::string> missing;
    std::vector<std::string> named = {options.unk_token, options.cls_token, options.sep_token, options.pad_token,
                                      options.mask_token};
    named.insert(named.end(), options.additional_special_tokens.begin(), options.additional_special_tokens.end());
    special_ids.resize(vocabulary.size());
    for (const auto& token : named) {
      const auto found = ids.find(token);
      if (found == ids.end()) {
        missing.push_back(fmt::format("'{}'", token));
      } else if (!special_ids[static_cast<size_t>(found->second)]) {
        special.emplace_back(token, found->second);
        special_ids[static_cast<size_t>(found->second)] = true;
      }
    }
    if (!missing.empty())
      fail(
          "it has {} tokens but lacks {}. Is it the vocabulary of another model, or does "
          "tokenizer_config.json name other special tokens?",
          vocabulary.size(), fmt::join(missing, ", "));
    for (size_t id = 0; id < vocabulary.size(); ++id) {
      const std::string_view token = vocabulary[id];
      first.insert(token, static_cast<int32_t>(id));
      if (token.starts_with(kContinuation)) next.insert(token.substr(kContinuation.size()), static_cast<int32_t>(id));
    }
    unk = ids.at(options.unk_token);
    cls = ids.at(options.cls_token);
    sep = ids.at(options.sep_token);
    pad = ids.at(options.pad_token);
    // The longest of special tokens that start alike wins.
    std::sort(special.begin(), special.end(),
              [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
    for (const auto& [token, id] : special) special_starts[static_cast<unsigned char>(token.front())] = true;
  }

  bool is_special(int64_t id) const { return special_ids[static_cast<size_t>(id)]; }

  void append_word(std::string_view word, std::vector<int64_t>& out) const {
    if (static_cast<int64_t>(word.size()) > options.max_input_chars_per_word &&
        code_points(word) > options.max_input_chars_per_word)
      return out.push_back(unk);
    const auto start = out.size();
    const auto* table = &first;
    while (!word.empty()) {
      const auto piece = table->longest_prefix(word);
      if (piece.id < 0) {  // one piece missing makes the whole word unknown
        out.resize(start);
        return out.push_back(unk);
      }
      out.push_back(piece.id);
      word.remove_prefix(piece.bytes);
      table = &next;
    }
  }

  void append_plain(std::string_view text, Words& words, std::vector<int64_t>& out) const {
    words.clear();
    split_words(
        text,
        {options.do_lower_case, options.strip_accents.value_or(options.do_lower_case), options.tokenize_chinese_chars},
        words);
    size_t begin = 0;
    for (const size_t end : words.ends) {
      append_word(std::string_view(words.bytes).substr(begin, end - begin), out);
      begin = end;
    }
  }

  /// Special tokens that are spelt out in the text are taken as such before anything is cleaned.
  std::vector<int64_t> tokenize(std::string_view text) const {
    thread_local Words words;
    std::vector<int64_t> out;
    out.reserve(text.size() / 4 + 4);
    size_t begin = 0;
    for (size_t i = 0; i < text.size(); ++i) {
      if (!special_starts[static_cast<unsigned char>(text[i])]) continue;
      const auto found = std::find_if(special.begin(), special.end(),
                                      [&](const auto& token) { return text.substr(i).starts_with(token.first); });
      if (found == special.end()) continue;
      append_plain(text.substr(begin, i - begin), words, out);
      out.push_back(found->second);
      begin = i + found->first.size();
      i = begin - 1;
    }
    append_plain(text.substr(begin), words, out);
    return out;
  }

  Encoding encode(std::string_view text, const std::string_view* pair, const EncodeOptions& how) const {
    auto a = tokenize(text);
    auto b = pair ? tokenize(*pair) : std::vector<int64_t>();
    const size_t specials = how.add_special_tokens ? (pair ? 3 : 2) : 0;
    const int64_t limit = how.max_length.value_or(options.model_max_length);
    if (how.truncation) {
      if (limit < static_cast<int64_t>(specials))
        raise<ConfigError>(
            "WordPieceTokenizer: max_length is {}, which has no room for the {} special tokens. Choose a larger one.",
            limit, specials);
      const auto [keep_a, keep_b] = longest_first(a.size(), b.size(), static_cast<size_t>(limit) - specials);
      a.resize(std::min(a.size(), keep_a));
      b.resize(std::min(b.size(), keep_b));
    }
    Encoding encoding;
    auto& ids = encoding.input_ids;
    ids.reserve(a.size() + b.size() + specials);
    if (how.add_special_tokens) ids.push_back(cls);
    ids.insert(ids.end(), a.begin(), a.end());
    if (how.add_special_tokens) ids.push_back(sep);
    const auto first_segment = ids.size();
    ids.insert(ids.end(), b.begin(), b.end());
    if (how.add_special_tokens && pair) ids.push_back(sep);
    encoding.token_type_ids.assign(ids.size(), 1);
    std::fill_n(encoding.token_type_ids.begin(), first_segment, 0);
    encoding.attention_mask.assign(ids.size(), 1);
    if (how.padding == Padding::max_length && static_cast<int64_t>(ids.size()) < limit)
      pad_to(static_cast<size_t>(limit), encoding);
    return encoding;
  }

  void pad_to(size_t length, Encoding& encoding) const {
    encoding.input_ids.resize(length, pad);
    encoding.token_type_ids.resize(length, 0);
    encoding.attention_mask.resize(length, 0);
  }

  WordPieceOptions options;
  std::vector<std::string> vocabulary;
  std::unordered_map<std::string_view, int64_t> ids;  ///< Views into `vocabulary`.
  PieceTable first, next;  ///< Pieces that start a word, and those that continue one, without "##".
  std::vector<std::pair<std::string, int64_t>> special;  ///< Longest first.
  std::vector<bool> special_ids;
  std::array<bool, 256> special_starts{};  ///< By first byte.
  int64_t unk = 0, cls = 0, sep = 0, pad = 0;
};

WordPieceTokenizer::WordPieceTokenizer(std::vector<std::string> vocabulary, const WordPieceOptions& options)
    : content_(std::make_shared<const Content>(std::move(vocabulary), options)) {}
WordPieceTokenizer::~WordPieceTokenizer() = default;
WordPieceTokenizer::WordPieceTokenizer(const WordPieceTokenizer&) = default;
WordPieceTokenizer::WordPieceTokenizer(WordPieceTokenizer&&) noexcept = default;
WordPieceTokenizer& WordPieceTokenizer::operator=(const WordPieceTokenizer&) = default;
WordPieceTokenizer& WordPieceTokenizer::operator=(WordPieceTokenizer&&) noexcept = default;

WordPieceTokenizer WordPieceTokenizer::from_pretrained(const fs::path& folder) {
  const auto json_path = folder / kJsonFile;
  const bool of_json = is_there(json_path);
  const auto path = of_json ? json_path : folder / kVocabFile;
  WordPieceOptions options;
  nlohmann::json json;
  std::vector<std::string> vocabulary;
  if (of_json) {
    const JsonFile file(json_path);
    vocabulary = vocabulary_of(file.at("model"), options);
    json = file.root();
  } else {
    vocabulary = lines_of(path);
  }
  if (const auto config_path = folder / kConfigFile; is_there(config_path)) {
    const JsonFile config(config_path);
    config.read("do_lower_case", options.do_lower_case);
    config.read("strip_accents", options.strip_accents);
    config.read("tokenize_chinese_chars", options.tokenize_chinese_chars);
    config.read("clean_up_tokenization_spaces", options.clean_up_tokenization_spaces);
    // Some writers put 1e30 there for "no limit".
    auto limit = static_cast<double>(options.model_max_length);
    config.read("model_max_length", limit);
    if (limit >= 1 && limit < 1e9) options.model_max_length = static_cast<int64_t>(limit);
  }
  read_special_tokens(folder, json, options, vocabulary);
  try {
    return WordPieceTokenizer(std::move(vocabulary), options);
  } catch (const CheckpointError& error) {
    raise<CheckpointError>("'{}': {}", path.string(), error.what());
  }
}

void WordPieceTokenizer::save_pretrained(const fs::path& folder) const {
  create_folder(folder);
  std::string lines;
  for (const auto& token : content_->vocabulary) lines.append(token).append("\n");
  write_text_file(folder / kVocabFile, lines);
  const auto& o = options();
  nlohmann::ordered_json config;
  config["tokenizer_class"] = "BertTokenizer";
  config["do_lower_case"] = o.do_lower_case;
  config["strip_accents"] = o.strip_accents ? nlohmann::ordered_json(*o.strip_accents) : nlohmann::ordered_json();
  config["tokenize_chinese_chars"] = o.tokenize_chinese_chars;
  config["model_max_length"] = o.model_max_length;
  config["unk_token"] = o.unk_token;
  config["cls_token"] = o.cls_token;
  config["sep_token"] = o.sep_token;
  config["pad_token"] = o.pad_token;
  config["mask_token"] = o.mask_token;
  config["additional_special_tokens"] = o.additional_special_tokens;
  config["clean_up_tokenization_spaces"] = o.clean_up_tokenization_spaces;
  write_text_file(folder / kConfigFile, config.dump(2) + "\n");
}

Encoding WordPieceTokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return content_->encode(text, nullptr, options);
}
Encoding WordPieceTokenizer::encode(std::string_view text, std::string_view pair, const EncodeOptions& options) const {
  return content_->encode(text, &pair, options);
}

BatchEncoding WordPieceTokenizer::encode_batch(const std::vector<std::string>& texts,
                                               const std::vector<std::string>& pairs,
                                               const EncodeOptions& options) const {
  if (texts.empty()) throw ShapeError("WordPieceTokenizer::encode_batch: there are no texts, expected at least one.");
  if (!pairs.empty() && pairs.size() != texts.size())
    raise<ShapeError>("WordPieceTokenizer::encode_batch: {} texts but {} second texts. Pass as many, or none.",
                      texts.size(), pairs.size());
  std::vector<Encoding> rows;
  rows.reserve(texts.size());
  size_t longest = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    rows.push_back(pairs.empty() ? encode(texts[i], options) : encode(texts[i], pairs[i], options));
    longest = std::max(longest, rows.back().input_ids.size());
  }
  const auto batch = static_cast<int64_t>(rows.size());
  const auto length = static_cast<int64_t>(longest);
  BatchEncoding result{at::empty({batch, length}, at::kLong), at::empty({batch, length}, at::kLong),
                       at::empty({batch, length}, at::kLong)};
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].input_ids.size() != longest) {
      if (options.padding == Padding::none)
        raise<ShapeError>(
            "WordPieceTokenizer::encode_batch: row {} has {} tokens and another {}, which make no tensor. Choose "
            "Padding::longest or Padding::max_length.",
            i, rows[i].input_ids.size(), longest);
      content_->pad_to(longest, rows[i]);
    }
    std::copy(rows[i].input_ids.begin(), rows[i].input_ids.end(),
              result.input_ids.mutable_data_ptr<int64_t>() + i * longest);
    std::copy(rows[i].token_type_ids.begin(), rows[i].token_type_ids.end(),
              result.token_type_ids.mutable_data_ptr<int64_t>() + i * longest);
    std::copy(rows[i].attention_mask.begin(), rows[i].attention_mask.end(),
              result.attention_mask.mutable_data_ptr<int64_t>() + i * longest);
  }
  return result;
}

std::vector<std::string> WordPieceTokenizer::tokenize(std::string_view text) const {
  std::vector<std::string> tokens;
  for (const int64_t id : content_->tokenize(text)) tokens.push_back(id_to_token(id));
  return tokens;
}

std::string WordPieceTokenizer::decode(const std::vector<int64_t>& ids, bool skip_special_tokens) const {
  // Before these the space is dropped, as English spells them.
  constexpr std::string_view kClosing[] = {".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re"};
  std::string text;
  bool first = true;
  for (const int64_t id : ids) {
    std::string_view token = id_to_token(id);
    if (skip_special_tokens && content_->is_special(id)) continue;
    if (!first && token.starts_with(kContinuation)) {
      token.remove_prefix(kContinuation.size());
    } else if (!first && std::none_of(std::begin(kClosing), std::end(kClosing),
                                      [&](std::string_view mark) { return token.starts_with(mark); })) {
      text += ' ';
    }
    text += token;
    first = false;
  }
  if (options().clean_up_tokenization_spaces)
    for (const auto& [from, to] : kCleanedUp) text = replaced(text, from, to);
  return text;
}

const WordPieceOptions& WordPieceTokenizer::options() const { return content_->options; }
int64_t WordPieceTokenizer::vocab_size() const { return static_cast<int64_t>(content_->vocabulary.size()); }
int64_t WordPieceTokenizer::pad_token_id() const { return content_->pad; }

std::optional<int64_t> WordPieceTokenizer::token_to_id(std::string_view token) const {
  const auto found = content_->ids.find(token);
  return found == content_->ids.end() ? std::nullopt : std::optional(found->second);
}

const std::string& WordPieceTokenizer::id_to_token(int64_t id) const {
  if (id < 0 || id >= vocab_size())
    raise<ShapeError>(
        "WordPieceTokenizer: the id {} is not in the vocabulary of {} tokens. Is it from another tokenizer?", id,
        vocab_size());
  return content_->vocabulary[static_cast<size_t>(id)];
}

}  // namespace accelerate::models
