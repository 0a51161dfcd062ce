#include <algorithm>
#include <cctype>

#include "accelerate/config.hpp"

namespace accelerate {
namespace {

std::string plain(std::string_view name) {
  std::string result;
  for (char c : name) result += c == '-' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

/// Optimal string alignment: like Levenshtein's distance, but two swapped neighbours cost one.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i)
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

}  // namespace

std::optional<std::string> nearest_name(std::string_view given, const std::vector<std::string>& valid) {
  constexpr size_t kLongest = 1000;  // nobody mistypes more; files may hold names of megabytes
  if (given.size() > kLongest) return std::nullopt;
  const std::string wanted = plain(given);
  std::optional<std::string> best;
  size_t best_distance = std::max<size_t>(1, wanted.size() / 3) + 1;
  for (const auto& name : valid) {
    // At least as many letters must be inserted or removed.
    if (std::max(name.size(), wanted.size()) - std::min(name.size(), wanted.size()) >= best_distance) continue;
    if (const size_t d = distance(wanted, plain(name)); d < best_distance) best = name, best_distance = d;
  }
  return best;
}

}  // namespace accelerate
