#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "accelerate/accelerator/model_summary.hpp"

namespace accelerate {
namespace {

/// "124,439,808"
std::string count(int64_t value) {
  std::string digits = std::to_string(value);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

std::string size(int64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1000 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

/// "float32"
std::string name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kDouble:
      return "float64";
    case at::kHalf:
      return "float16";
    case at::kBFloat16:
      return "bfloat16";
    case at::kLong:
      return "int64";
    case at::kInt:
      return "int32";
    case at::kShort:
      return "int16";
    case at::kChar:
      return "int8";
    case at::kByte:
      return "uint8";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

std::vector<std::string> names_of(const std::vector<at::ScalarType>& dtypes) {
  std::vector<std::string> names;
  for (const auto dtype : dtypes) names.push_back(name_of(dtype));
  return names;
}

/// "weight 768x3072, bias 3072"
std::string shapes(const ModelSummary& summary, const ModuleSummary& module) {
  std::vector<std::string> texts;
  for (const auto& [name, index] : module.own)
    texts.push_back(fmt::format("{} {}", name, fmt::join(summary.tensors[index].shape, "x")));
  constexpr size_t kMost = 3;
  const size_t more = texts.size() > kMost ? texts.size() - kMost : 0;
  texts.resize(texts.size() - more);
  return fmt::format("{}{}", fmt::join(texts, ", "), more ? fmt::format(", {} more", more) : "");
}

using Row = std::array<std::string, 8>;

constexpr std::array<bool, 8> kNumbers = {false, false, false, true, true, false, false, true};

std::string lines(const std::vector<Row>& rows) {
  std::array<size_t, 8> widths{};
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i)
      line += (i ? "  " : "") +
              (kNumbers[i] ? fmt::format("{:>{}}", row[i], widths[i]) : fmt::format("{:<{}}", row[i], widths[i]));
    text += line.erase(line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string places(const std::map<std::string, int64_t>& rank) {
  std::vector<std::string> texts;
  for (const auto& [place, bytes] : rank)
    if (bytes > 0) texts.push_back(size(bytes) + " " + place);
  return texts.empty() ? "nothing" : fmt::format("{}", fmt::join(texts, ", "));
}

/// The bytes that ranks keep: a line for each, or one where all keep the same.
std::string ranks_text(const std::vector<std::map<std::string, int64_t>>& ranks) {
  constexpr size_t kMost = 16;
  if (ranks.size() == 1) return "in memory: " + places(ranks.front());
  if (std::all_of(ranks.begin(), ranks.end(), [&](const auto& rank) { return rank == ranks.front(); }))
    return fmt::format("in memory of each of {} ranks: {}", ranks.size(), places(ranks.front()));
  std::string text = "in memory:";
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i)
    text += fmt::format("\n  rank {}: {}", i, places(ranks[i]));
  if (ranks.size() > kMost) text += fmt::format("\n  and {} more ranks", ranks.size() - kMost);
  return text;
}

}  // namespace

std::string ModelSummary::text(const SummaryOptions& options) const {
  std::vector<Row> rows{{"module", "class", "shapes", "parameters", "trainable", "dtype", "where", "bytes here"}};
  for (const auto& module : modules) {
    if (options.depth && module.depth > *options.depth) continue;
    rows.push_back(
        {module.path.empty() ? "(model)" : module.path, module.class_name, shapes(*this, module),
         count(module.parameters), count(module.trainable), fmt::format("{}", fmt::join(names_of(module.dtypes), ", ")),
         fmt::format("{}", fmt::join(module.places, ", ")), module.bytes > 0 ? size(module.bytes_here) : ""});
  }
  const auto& all = modules.front();
  int64_t buffers = 0, buffer_bytes = 0, tied = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.parameter) ++buffers, buffer_bytes += tensor.bytes;
    tied += static_cast<int64_t>(tensor.tied.size());
  }
  std::string text = lines(rows);
  text += fmt::format("parameters: {}, of them trainable: {}", count(all.parameters), count(all.trainable));
  if (tied > 0) text += fmt::format("; tied, and counted once: {}", tied);
  text += fmt::format("\nwhole: {}", size(all.bytes));
  if (buffers > 0) text += fmt::format(", of it {} in {} buffers", size(buffer_bytes), buffers);
  if (shards > 1) text += fmt::format("; sharded over {} ranks", shards);
  return text + "\n" + ranks_text(ranks);
}

std::string ModelSummary::json() const {
  using json = nlohmann::ordered_json;
  json result{{"modules", json::array()}, {"tensors", json::array()}, {"ranks", ranks}, {"shards", shards}};
  for (const auto& module : modules) {
    json own = json::array();
    for (const auto& [name, index] : module.own) own.push_back({{"name", name}, {"tensor", tensors[index].name}});
    result["modules"].push_back({{"path", module.path},
                                 {"class", module.class_name},
                                 {"depth", module.depth},
                                 {"own", own},
                                 {"parameters", module.parameters},
                                 {"trainable", module.trainable},
                                 {"bytes", module.bytes},
                                 {"bytes_here", module.bytes_here},
                                 {"dtypes", names_of(module.dtypes)},
                                 {"places", module.places}});
  }
  for (const auto& tensor : tensors)
    result["tensors"].push_back({{"name", tensor.name},
                                 {"tied", tensor.tied},
                                 {"shape", tensor.shape},
                                 {"dtype", name_of(tensor.dtype)},
                                 {"parameter", tensor.parameter},
                                 {"trainable", tensor.trainable},
                                 {"place", tensor.place},
                                 {"bytes", tensor.bytes},
                                 {"bytes_here", tensor.bytes_here}});
  return result.dump();
}

}  // namespace accelerate
