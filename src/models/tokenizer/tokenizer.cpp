#include "accelerate/models/tokenizer.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include "models/json_file.hpp"
#include "models/tokenizer/byte_level.hpp"
#include "models/tokenizer/content.hpp"
#include "models/tokenizer/utf8.hpp"
#include "utils/raise.hpp"

namespace accelerate::models {
namespace {

std::string normalize(const std::string& text, NormalForm form) {
  UErrorCode error = U_ZERO_ERROR;
  const auto* normalizer = form == NormalForm::nfc    ? icu::Normalizer2::getNFCInstance(error)
                           : form == NormalForm::nfd  ? icu::Normalizer2::getNFDInstance(error)
                           : form == NormalForm::nfkc ? icu::Normalizer2::getNFKCInstance(error)
                                                      : icu::Normalizer2::getNFKDInstance(error);
  if (U_FAILURE(error)) raise<InternalError>("ICU's normalizer: {}", u_errorName(error));
  const bool ascii = std::all_of(text.begin(), text.end(), [](char c) { return static_cast<signed char>(c) >= 0; });
  if (ascii) return text;
  const auto normal = normalizer->normalize(icu::UnicodeString::fromUTF8(text), error);
  if (U_FAILURE(error)) raise<InternalError>("ICU's normalizer: {}", u_errorName(error));
  std::string result;
  normal.toUTF8String(result);
  return result;
}

std::string normalize(std::string text, const std::vector<Normalization>& steps) {
  for (const auto& step : steps) {
    if (const auto* form = std::get_if<NormalForm>(&step)) {
      text = normalize(text, *form);
      continue;
    }
    const auto& [pattern, content] = std::get<Replacement>(step);
    std::string replaced;
    pattern.find(text, [&](std::string_view piece, bool is_match) { replaced += is_match ? content : piece; });
    text = std::move(replaced);
  }
  return text;
}

/// Appends the pieces that a step cuts a text into.
void split(std::string_view text, const SplitStep& step, std::vector<std::string_view>& pieces) {
  const auto whole = [](std::string_view first, std::string_view second) {
    return std::string_view(first.data(), first.size() + second.size());
  };
  const size_t begin = pieces.size();
  bool before = false, waits = false;  // the piece before is a match, and the next one belongs to it
  step.pattern.find(text, [&](std::string_view piece, bool found) {
    const bool is_match = found != step.invert, joins = pieces.size() > begin;
    switch (step.behavior) {
      case SplitBehavior::isolated:
        pieces.push_back(piece);
        break;
      case SplitBehavior::removed:
        if (!is_match) pieces.push_back(piece);
        break;
      case SplitBehavior::contiguous:
        if (joins && is_match == before) pieces.back() = whole(pieces.back(), piece);
        else pieces.push_back(piece);
        break;
      case SplitBehavior::merged_with_previous:
        if (is_match && !before && joins) pieces.back() = whole(pieces.back(), piece);
        else pieces.push_back(piece);
        break;
      case SplitBehavior::merged_with_next:  // of matches in a row the last one
        if (waits && !is_match) pieces.back() = whole(pieces.back(), piece);
        else pieces.push_back(piece);
        waits = is_match;
        break;
    }
    before = is_match;
  });
  pieces.erase(std::remove(pieces.begin() + static_cast<std::ptrdiff_t>(begin), pieces.end(), std::string_view()),
               pieces.end());
}

/// The same by what the bytes are spelt as.
void split_spelt(std::string_view bytes, const SplitStep& step, std::vector<std::string_view>& pieces) {
  std::string text;
  std::vector<size_t> places;  // of each byte of the spelt text
  for (size_t i = 0; i < bytes.size(); ++i) {
    append_spelt(bytes[i], text);
    places.resize(text.size(), i);
  }
  places.push_back(bytes.size());
  std::vector<std::string_view> cut;
  split(text, step, cut);
  for (const auto piece : cut) {
    const auto begin = static_cast<size_t>(piece.data() - text.data());
    pieces.push_back(bytes.substr(places[begin], places[begin + piece.size()] - places[begin]));
  }
}

/// The characters of `text` right before and right behind `at`, whole or none.
std::string_view character_before(std::string_view text, size_t at) {
  size_t begin = at;
  while (begin > 0 && (static_cast<unsigned char>(text[--begin]) & 0xC0) == 0x80) {
  }
  return text.substr(begin, at - begin);
}
std::string_view character_at(std::string_view text, size_t at) {
  return at < text.size() ? text.substr(at, next_utf8(text.substr(at)).bytes) : std::string_view();
}

bool is_space(std::string_view character) {
  return !character.empty() && u_isUWhiteSpace(static_cast<UChar32>(code_point(character)));
}
/// Whether \w matches it in the package's regular expressions.
bool is_of_word(std::string_view character) {
  if (character.empty()) return false;
  const auto code = static_cast<UChar32>(code_point(character));
  return u_hasBinaryProperty(code, UCHAR_ALPHABETIC) || u_hasBinaryProperty(code, UCHAR_JOIN_CONTROL) ||
         (U_GET_GC_MASK(code) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0;
}

/// Calls plain(text) for what lies between added tokens and token(it) for these; the leftmost wins, of those the
/// longest.
template <class Plain, class Token>
void split_added(std::string_view text, const std::array<std::vector<const AddedToken*>, 256>& starts,
                 const Plain& plain, const Token& token) {
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    const auto& candidates = starts[static_cast<unsigned char>(text[i])];
    const auto found = std::find_if(candidates.begin(), candidates.end(), [&](const AddedToken* added) {
      return text.substr(i).starts_with(added->content);
    });
    if (found == candidates.end()) {
      ++i;
      continue;
    }
    size_t begin = i, end = i + (*found)->content.size();
    if ((*found)->single_word && (is_of_word(character_before(text, begin)) || is_of_word(character_at(text, end)))) {
      i = end;
      continue;
    }
    if ((*found)->strip_left)
      for (auto space = character_before(text, begin); begin > done && is_space(space);
           space = character_before(text, begin))
        begin -= space.size();
    if ((*found)->strip_right)
      for (auto space = character_at(text, end); is_space(space); space = character_at(text, end)) end += space.size();
    if (begin > done) plain(text.substr(done, begin - done));
    token(**found);
    done = i = end;
  }
  if (done < text.size()) plain(text.substr(done));
}

}  // namespace

Tokenizer::Content::Content(TokenizerParts given, const std::string& file) : parts(std::move(given)) {
  const auto fail = [&]<class... Args>(fmt::format_string<Args...> what, Args&&... args) {
    raise<CheckpointError>("tokenizer '{}': {}", file, fmt::format(what, std::forward<Args>(args)...));
  };
  const auto most = static_cast<int64_t>(parts.tokens.size() + parts.added.size()) + kMostGaps;
  // One that the vocabulary has, too, is still what its pieces merge into, where the text has it as a part of a word.
  std::unordered_set<size_t> of_vocabulary;
  for (const auto& token : parts.added) {
    if (token.id < 0 || token.id >= most)
      fail("the added token '{}' has the id {}, expected 0 to {} for {} tokens. The file is damaged.",
           token.content.substr(0, 100), token.id, most - 1, parts.tokens.size() + parts.added.size());
    if (static_cast<size_t>(token.id) >= parts.tokens.size()) parts.tokens.resize(static_cast<size_t>(token.id) + 1);
    auto& there = parts.tokens[static_cast<size_t>(token.id)];
    if (there == token.content) of_vocabulary.insert(static_cast<size_t>(token.id));
    there = token.content;
  }
  const auto size = parts.tokens.size();
  if (size == 0) fail("it has no tokens. The file is damaged.");
  bytes.resize(size);
  special.assign(size, false);
  ids.emplace(parts.tokens);
  // The package's decoder takes added tokens for spelt bytes, too, where they could be.
  const auto text_of_added = [&](const std::string& token) {
    return parts.decodes_added ? bytes_of_token(token).value_or(token) : token;
  };
  std::vector<std::string> mergeable(size);
  std::vector<bool> is_added(size, false);
  for (const auto& token : parts.added) is_added[static_cast<size_t>(token.id)] = true;
  for (size_t id = 0; id < size; ++id) {
    const auto& token = parts.tokens[id];
    if (token.empty()) continue;
    const bool only_added = is_added[id] && !of_vocabulary.contains(id);
    const auto meant = only_added ? std::nullopt : bytes_of_token(token);
    if (meant) mergeable[id] = *meant;
    bytes[id] = is_added[id] ? text_of_added(token) : meant.value_or(token);
  }
  std::vector<Bpe::Merge> merges;
  merges.reserve(parts.merges.size());
  for (const auto& [left, right] : std::exchange(parts.merges, {})) {
    const Bpe::Merge merge{ids->find(left), ids->find(right), ids->find(left + right)};
    if (merge.left < 0 || merge.right < 0 || merge.result < 0)
      fail(
          "the merge of '{}' and '{}' is of tokens that the vocabulary lacks. The files are of different "
          "tokenizers, or damaged.",
          left.substr(0, 100), right.substr(0, 100));
    merges.push_back(merge);
  }
  const auto unk = parts.unk.empty() ? -1 : ids->find(parts.unk);
  if (!parts.unk.empty() && unk < 0)
    fail("the model's unk_token is '{}', which the vocabulary lacks. The file is damaged.", parts.unk.substr(0, 100));
  bpe.emplace(mergeable, merges, BpeOptions{.whole_words = parts.whole_words, .unk = unk, .fuse_unk = parts.fuse_unk});
  for (const auto& token : parts.added) {
    if (token.content.empty()) continue;
    auto normal = token;
    if ((token.normalized || token.once_normalized) && !parts.normalizers.empty()) {
      normal.content = normalize(token.content, parts.normalizers);
      bytes[static_cast<size_t>(token.id)] = text_of_added(normal.content);
    }
    special[static_cast<size_t>(token.id)] = token.special && normal.content == token.content;
    const auto* sought = &token;
    if (token.normalized && normal.content != token.content) sought = &normalized_tokens.emplace_back(normal);
    if (sought->content.empty() || (token.special && parts.split_special_tokens)) continue;
    has_normalized_ = has_normalized_ || token.normalized;
    (token.normalized ? normalized_added : raw_added)[static_cast<unsigned char>(sought->content[0])].push_back(sought);
  }
  for (auto* table : {&raw_added, &normalized_added})
    for (auto& starts : *table)
      std::stable_sort(starts.begin(), starts.end(),
                       [](const AddedToken* a, const AddedToken* b) { return a->content.size() > b->content.size(); });
  const auto check = [&](int64_t id) {
    if (id < 0 || static_cast<size_t>(id) >= size)
      fail("a special token has the id {}, and there are {} tokens. The file is damaged.", id, size);
  };
  for (const auto& id : {parts.bos, parts.eos, parts.pad})
    if (id) check(*id);
  for (const auto* around : {&parts.prefix, &parts.suffix}) std::for_each(around->begin(), around->end(), check);
}

void Tokenizer::Content::encode(std::string_view text, std::vector<int64_t>& out) const {
  split_added(
      text, raw_added, [&](std::string_view plain) { encode_plain(plain, out); },
      [&](const AddedToken& token) { out.push_back(token.id); });
}

void Tokenizer::Content::encode_plain(std::string_view text, std::vector<int64_t>& out) const {
  if (parts.normalizers.empty() && !has_normalized_) return encode_pieces(text, out);
  const auto normal = normalize(std::string(text), parts.normalizers);
  split_added(
      normal, normalized_added, [&](std::string_view plain) { encode_pieces(plain, out); },
      [&](const AddedToken& token) { out.push_back(token.id); });
}

void Tokenizer::Content::encode_pieces(std::string_view text, std::vector<int64_t>& out) const {
  std::vector<std::string_view> pieces = {text}, next;
  std::deque<std::string> changed;  // owns pieces that are not parts of the text
  for (const auto& step : parts.pre_tokenizers) {
    next.clear();
    for (const auto piece : pieces) {
      if (const auto* cut = std::get_if<SplitStep>(&step)) {
        (cut->spelt ? split_spelt : split)(piece, *cut, next);
      } else {
        next.push_back(piece.starts_with(' ') ? piece : changed.emplace_back(" " + std::string(piece)));
      }
    }
    pieces.swap(next);
  }
  Bpe::Cache cache;
  for (const auto piece : pieces) bpe->append(piece, cache, out);
}

Tokenizer Tokenizer::from_pretrained(const std::filesystem::path& path) {
  return Tokenizer(std::make_shared<const Content>(read_tokenizer(path), path.string()));
}

void Tokenizer::save_pretrained(const std::filesystem::path& folder) const {
  const auto files = content_->parts.files();
  if (files.empty())
    throw CheckpointError(
        "Tokenizer::save_pretrained: the .gguf file that this is of puts a space before each text "
        "(tokenizer.ggml.add_space_prefix), and tokenizer.json has no part that does so; expected one that does not. "
        "Take the tokenizer of the folder that the file was made from");
  create_folder(folder);
  for (const auto& [name, text] : files) write_text_file(folder / name, text);
  // What lies there of another tokenizer would be read with these.
  for (const char* name : kTokenizerFiles)
    if (!files.contains(name)) std::filesystem::remove(folder / name);
}

std::vector<int64_t> Tokenizer::encode(std::string_view text, bool add_special_tokens) const {
  std::string copy;
  for (std::string_view rest = text; !rest.empty();) {
    const auto step = next_utf8(rest);
    if (!step.valid) {
      copy = text;
      text = copy = take_utf8(copy, false);
      break;
    }
    rest.remove_prefix(step.bytes);
  }
  std::vector<int64_t> out;
  out.reserve(text.size() / 4 + 4);
  if (add_special_tokens) out = content_->parts.prefix;
  content_->encode(text, out);
  if (add_special_tokens) out.insert(out.end(), content_->parts.suffix.begin(), content_->parts.suffix.end());
  return out;
}

TokenBatch Tokenizer::encode_batch(const std::vector<std::string>& texts, bool add_special_tokens) const {
  if (texts.empty()) throw ShapeError("Tokenizer::encode_batch: there are no texts, expected at least one.");
  std::vector<std::vector<int64_t>> rows;
  size_t longest = 0;
  for (const auto& text : texts)
    longest = std::max(longest, rows.emplace_back(encode(text, add_special_tokens)).size());
  const std::vector<int64_t> shape = {static_cast<int64_t>(rows.size()), static_cast<int64_t>(longest)};
  TokenBatch batch{at::full(shape, pad_token_id().value_or(eos_token_id().value_or(0)), at::kLong),
                   at::zeros(shape, at::kLong)};
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto begin = (i + 1) * longest - rows[i].size();
    std::copy(rows[i].begin(), rows[i].end(), batch.input_ids.mutable_data_ptr<int64_t>() + begin);
    std::fill_n(batch.attention_mask.mutable_data_ptr<int64_t>() + begin, rows[i].size(), 1);
  }
  return batch;
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids, bool skip_special_tokens) const {
  std::string bytes;
  for (const auto id : ids) {
    const auto& token = token_bytes(id);
    if (!skip_special_tokens || !is_special(id)) bytes += token;
  }
  return take_utf8(bytes, false);
}

const std::string& Tokenizer::token_bytes(int64_t id) const {
  if (id < 0 || id >= vocab_size())
    raise<ShapeError>("Tokenizer: there is no token {}; ids are 0 to {}. Are the ids of another model?", id,
                      vocab_size() - 1);
  return content_->bytes[static_cast<size_t>(id)];
}

std::string Tokenizer::apply_chat_template(const std::vector<ChatMessage>& messages, bool add_generation_prompt) const {
  return render_chat(content_->parts.chat_template, messages, add_generation_prompt);
}

int64_t Tokenizer::vocab_size() const { return static_cast<int64_t>(content_->bytes.size()); }
std::optional<int64_t> Tokenizer::token_to_id(std::string_view token) const {
  const int32_t found = content_->ids->find(token);
  return found < 0 ? std::nullopt : std::optional<int64_t>(found);
}
bool Tokenizer::is_special(int64_t id) const {
  return id >= 0 && id < vocab_size() && content_->special[static_cast<size_t>(id)];
}
std::optional<int64_t> Tokenizer::bos_token_id() const { return content_->parts.bos; }
std::optional<int64_t> Tokenizer::eos_token_id() const { return content_->parts.eos; }
std::optional<int64_t> Tokenizer::pad_token_id() const { return content_->parts.pad; }

std::string StreamDecoder::push(int64_t id) {
  // Embeddings have more rows than there are tokens, and a model may draw one of those.
  if (id < tokenizer_.vocab_size() && !(skip_special_tokens_ && tokenizer_.is_special(id)))
    pending_ += tokenizer_.token_bytes(id);
  return take(take_utf8(pending_, true), false);
}

std::string StreamDecoder::finish() { return take(take_utf8(pending_, false), true); }

std::string StreamDecoder::take(const std::string& text, bool is_last) {
  if (stopped_) return {};
  held_ += text;
  size_t end = std::string::npos, waits = 0;
  for (const auto& stop : stop_strings_) {
    end = std::min(end, held_.find(stop));
    size_t overlap = std::min(stop.size() - 1, held_.size());
    while (overlap > 0 && !held_.ends_with(std::string_view(stop).substr(0, overlap))) --overlap;
    waits = std::max(waits, overlap);
  }
  stopped_ = end != std::string::npos;
  if (!stopped_) end = is_last ? held_.size() : held_.size() - waits;
  auto result = held_.substr(0, end);
  held_.erase(0, end);
  return result;
}

}  // namespace accelerate::models
