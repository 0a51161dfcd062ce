#include "models/basic_tokenizer.hpp"
#include "utils/raise.hpp"

#include <array>
#include <limits>

#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

namespace accelerate::models {
namespace {

/// General category as the reference tokenizer sees it. Its tables are those of Unicode 8.0 and characters that are
/// newer have no category there: they are never taken for controls, accents or punctuation. ICU knows the age of each
/// character, which leaves the few whose category changed since.
int8_t category(UChar32 c) {
  UVersionInfo age;
  u_charAge(c, age);
  if (age[0] > 8) return U_UNASSIGNED;
  switch (c) {
    case 0x166D:
      return U_OTHER_PUNCTUATION;  // CANADIAN SYLLABICS CHI SIGN, now a symbol
    case 0x111C9:
      return U_OTHER_PUNCTUATION;  // SHARADA SANDHI MARK, now an accent
    case 0x1734:
      return U_NON_SPACING_MARK;  // HANUNOO SIGN PAMUDPOD, now spacing
    case 0x1885:                  // MONGOLIAN LETTER ALI GALI BALUDA and THREE BALUDA, now accents
    case 0x1886:
      return U_OTHER_LETTER;
    case 0xA9BD:
      return U_COMBINING_SPACING_MARK;  // JAVANESE CONSONANT SIGN KERET, now an accent
    default:
      return u_charType(c);
  }
}

/// Characters that are dropped. Unassigned ones are not among them.
bool is_control(UChar32 c) {
  constexpr uint32_t kOther = U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK;
  return c == 0xFFFD || (U_MASK(category(c)) & kOther) != 0;
}

bool is_space(UChar32 c) { return u_isUWhiteSpace(c); }
bool is_accent(UChar32 c) { return category(c) == U_NON_SPACING_MARK; }
bool is_punctuation(UChar32 c) { return (U_MASK(category(c)) & U_GC_P_MASK) != 0; }

/// Blocks of ideographs. 2B820 to 2B91F are left out as in the reference, though they are ideographs too.
bool is_cjk(UChar32 c) {
  constexpr UChar32 kBlocks[][2] = {{0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},   {0x20000, 0x2A6DF},
                                    {0x2A700, 0x2B73F}, {0x2B740, 0x2B81F}, {0x2B920, 0x2CEAF}, {0x2F800, 0x2FA1F}};
  if (c < kBlocks[0][0]) return false;
  for (const auto& block : kBlocks)
    if (c >= block[0] && c <= block[1]) return true;
  return false;
}

enum class Ascii : uint8_t { drop, space, punctuation, letter };

constexpr std::array<Ascii, 128> ascii_classes() {
  std::array<Ascii, 128> classes{};
  for (size_t c = 0; c < classes.size(); ++c) {
    const bool alphanumeric = (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    if (c == ' ' || c == '\t' || c == '\n' || c == '\r') classes[c] = Ascii::space;
    else if (c < ' ' || c == 0x7F) classes[c] = Ascii::drop;
    else classes[c] = alphanumeric ? Ascii::letter : Ascii::punctuation;
  }
  return classes;
}

constexpr auto kAscii = ascii_classes();

bool is_ascii(char c) { return static_cast<unsigned char>(c) < 0x80; }

void append_ascii(char c, bool lower_case, Words& words) {
  switch (kAscii[static_cast<unsigned char>(c)]) {
    case Ascii::drop:
      return;
    case Ascii::space:
      return words.end_word();
    case Ascii::punctuation:
      words.end_word();
      words.bytes += c;
      return words.end_word();
    case Ascii::letter:
      words.bytes += lower_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
  }
}

void append_utf8(UChar32 c, std::string& bytes) {
  std::array<uint8_t, U8_MAX_LENGTH> buffer{};
  int32_t length = 0;
  U8_APPEND_UNSAFE(buffer.data(), length, c);
  bytes.append(reinterpret_cast<const char*>(buffer.data()), static_cast<size_t>(length));
}

void append_lower(UChar32 c, std::string& bytes) {
  append_utf8(u_tolower(c), bytes);
  if (c == 0x130) append_utf8(0x307, bytes);  // I WITH DOT ABOVE is the one character whose lower case is two
}

/// Decodes, drops controls, makes spaces beyond ASCII plain ones, sets ideographs apart.
icu::UnicodeString clean(std::string_view text, bool space_cjk) {
  icu::UnicodeString cleaned;
  const auto length = static_cast<int32_t>(text.size());
  for (int32_t i = 0; i < length;) {
    UChar32 c = 0;
    U8_NEXT(text.data(), i, length, c);
    if (c < 0) continue;  // ill-formed
    if (c < 0x80) {
      cleaned.append(c);  // append_ascii sorts these
    } else if (is_control(c)) {
      continue;
    } else if (is_space(c)) {
      cleaned.append(u' ');
    } else if (space_cjk && is_cjk(c)) {
      cleaned.append(u' ').append(c).append(u' ');
    } else {
      cleaned.append(c);
    }
  }
  return cleaned;
}

void split_unicode(std::string_view text, const NormalizerOptions& options, Words& words) {
  if (text.size() > std::numeric_limits<int32_t>::max() / 2)
    raise<ShapeError>(
        "WordPieceTokenizer: a text has {} bytes, more than the 1 GiB that ICU handles at once. Split it.",
        text.size());
  auto cleaned = clean(text, options.space_cjk);
  if (options.strip_accents) {
    UErrorCode status = U_ZERO_ERROR;
    const auto* decompose = icu::Normalizer2::getNFDInstance(status);
    if (U_SUCCESS(status)) cleaned = decompose->normalize(cleaned, status);
    if (U_FAILURE(status))
      raise<InternalError>("WordPieceTokenizer: ICU can't normalise text: {}. Is its data file installed?",
                           u_errorName(status));
  }
  for (int32_t i = 0; i < cleaned.length();) {
    const UChar32 c = cleaned.char32At(i);
    i += U16_LENGTH(c);
    if (c < 0x80) {
      append_ascii(static_cast<char>(c), options.lower_case, words);
    } else if (options.strip_accents && is_accent(c)) {
      continue;
    } else if (is_space(c)) {
      words.end_word();
    } else if (is_punctuation(c)) {
      words.end_word();
      append_utf8(c, words.bytes);
      words.end_word();
    } else if (options.lower_case) {
      append_lower(c, words.bytes);
    } else {
      append_utf8(c, words.bytes);
    }
  }
}

}  // namespace

void split_words(std::string_view text, const NormalizerOptions& options, Words& words) {
  bool ascii = true;
  for (const char c : text) ascii = ascii && is_ascii(c);
  if (ascii) {
    for (const char c : text) append_ascii(c, options.lower_case, words);
  } else {
    split_unicode(text, options, words);
  }
  words.end_word();
}

}  // namespace accelerate::models
