#include "screen.hpp"

#include <algorithm>
#include <cstdlib>

namespace cli_test {
namespace {

std::string utf8(const std::u32string& line) {
  std::string text;
  for (const char32_t c : line) {
    if (c == U'\0') continue;  // the second half of a wide character
    if (c < 0x80) text += static_cast<char>(c);
    else if (c < 0x800) text += {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))};
    else if (c < 0x10000)
      text += {static_cast<char>(0xE0 | c >> 12), static_cast<char>(0x80 | (c >> 6 & 63)),
               static_cast<char>(0x80 | (c & 63))};
    else
      text += {static_cast<char>(0xF0 | c >> 18), static_cast<char>(0x80 | (c >> 12 & 63)),
               static_cast<char>(0x80 | (c >> 6 & 63)), static_cast<char>(0x80 | (c & 63))};
  }
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

bool wide(char32_t c) {
  return (c >= 0x1100 && c <= 0x115F) || (c >= 0x2E80 && c <= 0xA4CF) || (c >= 0xAC00 && c <= 0xD7A3) ||
         (c >= 0xFF00 && c <= 0xFF60) || c >= 0x1F300;
}

}  // namespace

void Screen::new_line() {
  if (row_ != bottom_) {
    row_ = std::min(row_ + 1, rows_ - 1);
    return;
  }
  if (top_ == 0) gone_.push_back(cells_[0]);
  cells_.erase(cells_.begin() + static_cast<std::ptrdiff_t>(top_));
  cells_.insert(cells_.begin() + static_cast<std::ptrdiff_t>(bottom_), std::u32string(columns_, U' '));
}

void Screen::put(char32_t c) {
  const size_t width = wide(c) ? 2 : 1;
  if (column_ + width > columns_) column_ = 0, new_line();
  cells_[row_][column_] = c;
  if (width == 2) cells_[row_][column_ + 1] = U'\0';
  column_ += width;
}

void Screen::escape(std::string_view& text) {
  const char kind = text.empty() ? '\0' : text.front();
  if (!text.empty()) text.remove_prefix(1);
  if (kind == '7') return void((saved_row_ = row_, saved_column_ = column_));
  if (kind == '8') return void((row_ = std::min(saved_row_, rows_ - 1), column_ = std::min(saved_column_, columns_)));
  if (kind != '[') return void(++unknown_);
  std::vector<size_t> numbers(1, 0);
  while (!text.empty() && ((text.front() >= '0' && text.front() <= '9') || text.front() == ';')) {
    if (text.front() == ';') numbers.push_back(0);
    else numbers.back() = numbers.back() * 10 + static_cast<size_t>(text.front() - '0');
    text.remove_prefix(1);
  }
  const char final = text.empty() ? '\0' : text.front();
  if (!text.empty()) text.remove_prefix(1);
  const auto number = [&](size_t i, size_t usual) { return i < numbers.size() && numbers[i] ? numbers[i] : usual; };
  const auto wipe = [&](size_t row, size_t from) {
    std::fill(cells_[row].begin() + static_cast<std::ptrdiff_t>(std::min(from, columns_)), cells_[row].end(), U' ');
  };
  switch (final) {
    case 'A':
      row_ -= std::min(row_ - (row_ >= top_ ? top_ : 0), number(0, 1));
      break;
    case 'H':
      row_ = std::min(number(0, 1), rows_) - 1, column_ = std::min(number(1, 1), columns_) - 1;
      break;
    case 'J':
      wipe(row_, column_);
      for (size_t i = row_ + 1; i < rows_; ++i) wipe(i, 0);
      break;
    case 'K':
      wipe(row_, column_);
      break;
    case 'm':
      break;
    case 'r': {
      const size_t top = number(0, 1) - 1, bottom = std::min(number(1, rows_), rows_) - 1;
      if (top < bottom) top_ = top, bottom_ = bottom, row_ = column_ = 0;
      break;
    }
    default:
      ++unknown_;
  }
}

void Screen::feed(std::string_view text) {
  while (!text.empty()) {
    const auto c = static_cast<unsigned char>(text.front());
    text.remove_prefix(1);
    if (c == 0x1B) escape(text);
    else if (c == '\n') new_line();
    else if (c == '\r') column_ = 0;
    else if (c < 0x20) ++unknown_;
    else {
      char32_t code = c;
      for (int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : c >= 0xC0 ? 1 : 0, i = more; i > 0 && !text.empty(); --i) {
        code = (i == more ? c & (0x3F >> more) : code) << 6 | (static_cast<unsigned char>(text.front()) & 0x3F);
        text.remove_prefix(1);
      }
      put(code);
    }
  }
}

void Screen::resize(size_t rows, size_t columns) {
  // As xterm: lines are cut or added at the bottom, unless the cursor would get lost; the region is forgotten.
  while (row_ >= rows)
    gone_.push_back(cells_.front()), cells_.erase(cells_.begin()), --row_, saved_row_ -= saved_row_ > 0;
  cells_.resize(rows);
  for (auto& line : cells_) line.resize(columns, U' ');
  rows_ = rows, columns_ = columns;
  top_ = 0, bottom_ = rows - 1;
  column_ = std::min(column_, columns);
}

std::string Screen::line(size_t row) const { return utf8(cells_.at(row)); }

std::vector<std::string> Screen::lines() const {
  std::vector<std::string> all;
  for (const auto& line : gone_) all.push_back(utf8(line));
  for (const auto& line : cells_) all.push_back(utf8(line));
  return all;
}

bool Screen::shows(std::string_view text) const {
  for (const auto& line : cells_)
    if (utf8(line).find(text) != std::string::npos) return true;
  return false;
}

}  // namespace cli_test
