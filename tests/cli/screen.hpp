#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cli_test {

/// As much of a terminal (ECMA-48, DEC's scrolling region and saved cursor) as the launcher's view and its ranks use.
/// Sequences that it does not know are counted.
class Screen {
 public:
  Screen(size_t rows, size_t columns)
      : rows_(rows), columns_(columns), cells_(rows, std::u32string(columns, U' ')), bottom_(rows - 1) {}
  void feed(std::string_view text);
  void resize(size_t rows, size_t columns);
  /// A line without the blanks at its end.
  std::string line(size_t row) const;
  /// All lines, also those that scrolled off the top.
  std::vector<std::string> lines() const;
  bool shows(std::string_view text) const;
  size_t row() const { return row_; }
  size_t rows() const { return rows_; }
  bool divided() const { return top_ != 0 || bottom_ != rows_ - 1; }
  size_t unknown() const { return unknown_; }

 private:
  void put(char32_t c);
  void new_line();
  void escape(std::string_view& text);
  size_t rows_, columns_, row_ = 0, column_ = 0, saved_row_ = 0, saved_column_ = 0;
  std::vector<std::u32string> cells_;
  std::vector<std::u32string> gone_;
  size_t top_ = 0, bottom_;
  size_t unknown_ = 0;
};

}  // namespace cli_test
