#include "accelerate/bigmodel/estimate.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <cmath>

namespace accelerate {

double TrainingUsage::peak() const { return std::max({model, gradients, optimizer, step}); }

TrainingUsage estimate_training_usage(double bytes, const std::string& mixed_precision) {
  constexpr double kAdamStates = 2;  // mean and variance, in fp32
  if (mixed_precision == "float32")
    return {.model = bytes, .gradients = bytes, .optimizer = kAdamStates * bytes, .step = (2 + kAdamStates) * bytes};
  // Weights stay in fp32; beside the gradients there is a copy of the weights in half the bytes, which the step no
  // longer needs.
  if (mixed_precision == "float16" || mixed_precision == "bfloat16" || mixed_precision == "fp8")
    return {.model = bytes,
            .gradients = bytes + std::floor(bytes / 2),
            .optimizer = kAdamStates * bytes,
            .step = kAdamStates * bytes};
  return {};
}

std::vector<MemoryEstimate> estimate_memory(const MaximumSizes& sizes, const std::vector<std::string>& dtypes) {
  std::vector<MemoryEstimate> estimates;
  for (const auto& dtype : dtypes) {
    if (dtype != "float32" && dtype != "float16" && dtype != "int8" && dtype != "int4")
      raise<ConfigError>("dtype '{}': expected float32, float16, int8 or int4.", dtype);
    const double share = dtype_byte_size(dtype) / dtype_byte_size("float32");
    estimates.push_back(
        {dtype, sizes.largest_layer.bytes * share, sizes.total * share, estimate_training_usage(sizes.total, dtype)});
  }
  return estimates;
}

namespace {

std::string times(size_t count, const std::string& text) {
  std::string result;
  for (size_t i = 0; i < count; ++i) result += text;
  return result;
}

/// As Python's str.center: an odd space goes to the left when the width is odd.
std::string centred(const std::string& text, size_t width) {
  if (text.size() >= width) return text;
  const size_t space = width - text.size(), left = space / 2 + (space & width & 1);
  return std::string(left, ' ') + text + std::string(space - left, ' ');
}

}  // namespace

std::string memory_table(const std::string& model, const std::vector<MemoryEstimate>& estimates) {
  std::vector<std::vector<std::string>> rows = {{"dtype", "Largest Layer", "Total Size", "Training using Adam"}};
  for (const auto& estimate : estimates) {
    const double peak = estimate.training.peak();
    rows.push_back({estimate.dtype, convert_bytes(estimate.largest_layer), convert_bytes(estimate.total),
                    peak < 0 ? "N/A" : convert_bytes(peak)});
  }
  std::vector<size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  const std::string title = "Memory Usage for loading `" + model + "`";
  size_t cells = 0;
  for (const size_t width : widths) cells += width;
  // A long title widens the last column: by as much as the reference does, which can be a little short.
  const size_t line = cells + widths.size() + 1;
  if (title.size() > cells) widths.back() += 2 * (title.size() > line ? title.size() - line : line - title.size());
  size_t inner = widths.size() - 1;
  for (const size_t width : widths) inner += width;
  if (title.size() > inner) widths.back() += title.size() - inner, inner = title.size();

  const auto rule = [&](const std::string& left, const std::string& between, const std::string& right) {
    std::string line = left;
    for (size_t i = 0; i < widths.size(); ++i) line += (i ? between : "") + times(widths[i], "─");
    return line + right + "\n";
  };
  std::string table = rule("┌", "─", "┐") + "│" + centred(title, inner) + "│\n" + rule("├", "┬", "┤");
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) table += "│" + centred(row[i], widths[i]);
    table += "│\n";
    if (&row == &rows.front()) table += rule("├", "┼", "┤");
  }
  table += rule("└", "┴", "┘");
  table.pop_back();
  return table;
}

}  // namespace accelerate
