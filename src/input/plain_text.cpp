#include "input/plain_text.hpp"

#include <locale.h>
#include <wchar.h>

namespace accelerate {
namespace {

constexpr char32_t kInvalid = 0xFFFD;

/// Takes the next character off `text`; kInvalid, and a byte off, for what is not UTF-8.
char32_t take(std::string_view& text) {
  const auto first = static_cast<unsigned char>(text.front());
  const size_t length = first < 0x80                    ? 1
                        : first >= 0xC2 && first < 0xE0 ? 2
                        : first >= 0xE0 && first < 0xF0 ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  char32_t code = length <= 1 ? first : first & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto next = i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
    if ((next & 0xC0) != 0x80) return text.remove_prefix(1), kInvalid;
    code = code << 6 | (next & 0x3F);
  }
  const bool valid = length == 1 || (length == 2) ||
                     (length == 3 && code >= 0x800 && (code < 0xD800 || code > 0xDFFF)) ||
                     (length == 4 && code >= 0x10000 && code <= 0x10FFFF);
  text.remove_prefix(valid ? length : 1);
  return valid ? code : kInvalid;
}

void append(std::string& text, char32_t code) {
  if (code < 0x80) return void(text += static_cast<char>(code));
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xF0 << (3 - more) & 0xFF) | (code >> 6 * more));
  for (int i = more - 1; i >= 0; --i) text += static_cast<char>(0x80 | (code >> 6 * i & 0x3F));
}

/// Takes what follows ESC off `text`: a sequence with parameters, a string up to its terminator, or the few bytes of a
/// short one.
void skip_escape(std::string_view& text) {
  if (text.empty()) return;
  const char kind = text.front();
  text.remove_prefix(1);
  if (kind == '[') {
    while (!text.empty() && text.front() >= 0x20 && text.front() < 0x40) text.remove_prefix(1);
    if (!text.empty()) text.remove_prefix(1);
  } else if (kind == ']' || kind == 'P' || kind == 'X' || kind == '^' || kind == '_') {
    while (!text.empty() && text.front() != '\a' && text.front() != '\x1b') text.remove_prefix(1);
    if (text.starts_with("\x1b\\")) text.remove_prefix(2);
    else if (text.starts_with('\a')) text.remove_prefix(1);
  } else if (kind >= 0x20 && kind < 0x30) {
    while (!text.empty() && text.front() >= 0x20 && text.front() < 0x30) text.remove_prefix(1);
    if (!text.empty()) text.remove_prefix(1);
  }
}

/// Marks that reorder what follows, so that a line would look like another one.
bool turns_direction(char32_t c) {
  return (c >= 0x202A && c <= 0x202E) || (c >= 0x2066 && c <= 0x2069) || c == 0x200E || c == 0x200F || c == 0x061C;
}

int width(char32_t c) {
  // The C library knows widths, for the characters of a locale; the program's own may be "C".
  static const locale_t utf8 = ::newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  if (c < 0x80 || !utf8) return 1;
  const locale_t before = ::uselocale(utf8);
  const int columns = ::wcwidth(static_cast<wchar_t>(c));
  ::uselocale(before);
  return columns < 0 ? 1 : columns;
}

}  // namespace

std::string plain_text(std::string_view line) {
  std::string result;
  while (!line.empty()) {
    const char32_t c = take(line);
    if (c == 0x1B) skip_escape(line);
    else if (c == '\t') result += ' ';
    else if (c >= 0x20 && (c < 0x7F || c > 0x9F) && c != 0x2028 && c != 0x2029 && !turns_direction(c))
      append(result, c);
  }
  return result;
}

std::string plain_lines(std::string_view text) {
  std::string result;
  for (size_t end = 0; (end = text.find('\n')) != text.npos; text.remove_prefix(end + 1))
    result += plain_text(text.substr(0, end)) + '\n';
  return result + plain_text(text);
}

size_t cells(std::string_view plain) {
  size_t columns = 0;
  while (!plain.empty()) columns += static_cast<size_t>(width(take(plain)));
  return columns;
}

std::string fitted(std::string_view plain, size_t columns, bool to_the_right) {
  const size_t needed = cells(plain);
  if (needed <= columns) {
    const std::string blanks(columns - needed, ' ');
    return to_the_right ? blanks + std::string(plain) : std::string(plain) + blanks;
  }
  if (columns == 0) return "";
  std::string result;
  size_t used = 0;
  for (std::string_view rest = plain; !rest.empty();) {
    const char32_t c = take(rest);
    const auto next = static_cast<size_t>(width(c));
    if (used + next > columns - 1) break;
    used += next;
    append(result, c);
  }
  return result + "…" + std::string(columns - 1 - used, ' ');
}

}  // namespace accelerate
