#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>

#include "accelerate/profiler.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

constexpr double kSecond = 1e6, kMillisecond = 1e3;  // in microseconds

std::string time_text(double us, const std::optional<std::string>& unit = std::nullopt) {
  if (unit ? *unit == "s" : us >= kSecond) return fmt::format("{:.3f}s", us / kSecond);
  if (unit ? *unit == "ms" : us >= kMillisecond) return fmt::format("{:.3f}ms", us / kMillisecond);
  return fmt::format("{:.3f}us", us);
}

std::string share_text(double us, double total_us) {
  return total_us == 0 ? "NaN" : fmt::format("{:.2f}%", us * 100.0 / total_us);
}

std::string bytes_text(int64_t bytes) {
  constexpr std::array<std::pair<const char*, int64_t>, 3> kUnits = {
      {{"GB", 1LL << 30}, {"MB", 1LL << 20}, {"KB", 1LL << 10}}};
  for (const auto& [name, size] : kUnits)
    if (std::abs(bytes) >= size)
      return fmt::format("{:.2f} {}", static_cast<double>(bytes) / static_cast<double>(size), name);
  return fmt::format("{} B", bytes);
}

std::string name_text(const std::string& name, int64_t width) {
  return static_cast<int64_t>(name.size()) >= width - 3 ? name.substr(0, width - 3) + "..." : name;
}

std::string end_of(std::string path, size_t width) {
  if (path.size() <= width) return path;
  path = path.substr(path.size() - width);
  return path.size() > 3 ? "..." + path.substr(3) : path;
}

using Column = std::function<double(const ProfileAverage&)>;

/// The column that rows are sorted by.
Column column_of(std::string name) {
  const std::string asked = name;
  for (const char* device : {"cuda", "xpu", "privateuse1"})
    if (const auto at = name.find(device); at != std::string::npos)
      name.replace(at, std::string_view(device).size(), "device");
  static const std::map<std::string, Column> kColumns = {
      {"cpu_time", [](const auto& r) { return r.cpu_time(); }},
      {"device_time", [](const auto& r) { return r.device_time(); }},
      {"cpu_time_total", [](const auto& r) { return r.cpu_time_total; }},
      {"device_time_total", [](const auto& r) { return r.device_time_total; }},
      {"self_cpu_time_total", [](const auto& r) { return r.self_cpu_time_total; }},
      {"self_device_time_total", [](const auto& r) { return r.self_device_time_total; }},
      {"cpu_memory_usage", [](const auto& r) { return static_cast<double>(r.cpu_memory_usage); }},
      {"device_memory_usage", [](const auto& r) { return static_cast<double>(r.device_memory_usage); }},
      {"self_cpu_memory_usage", [](const auto& r) { return static_cast<double>(r.self_cpu_memory_usage); }},
      {"self_device_memory_usage", [](const auto& r) { return static_cast<double>(r.self_device_memory_usage); }},
      {"count", [](const auto& r) { return static_cast<double>(r.count); }},
      {"flops", [](const auto& r) { return static_cast<double>(r.flops); }}};
  const auto found = kColumns.find(name);
  if (found == kColumns.end()) {
    std::vector<std::string> names;
    for (const auto& [key, column] : kColumns) names.push_back(key);
    raise<ConfigError>("table: sort_by is '{}', expected one of {} (or with cuda or xpu for device)", asked,
                       fmt::join(names, ", "));
  }
  return found->second;
}

/// Cells side by side, each as wide as its column at least.
struct TableLayout {
  struct Cell {
    std::string title;
    size_t width;
    bool left = false;
  };
  std::vector<Cell> cells;

  void add(std::string title, size_t width = 12, bool left = false) {
    cells.push_back({std::move(title), width, left});
  }
  std::string line(const std::vector<std::string>& texts) const {
    std::string line;
    for (size_t i = 0; i < cells.size(); ++i)
      line += cells[i].left ? fmt::format("{:<{}}  ", texts[i], cells[i].width)
                            : fmt::format("{:>{}}  ", texts[i], cells[i].width);
    return line + "\n";
  }
  std::string titles() const {
    std::vector<std::string> texts;
    for (const auto& cell : cells) texts.push_back(cell.title);
    return line(texts);
  }
  std::string rule() const {
    std::vector<std::string> texts;
    for (const auto& cell : cells) texts.emplace_back(cell.width, '-');
    return line(texts);
  }
  std::string double_rule() const {
    size_t width = 0;
    for (const auto& cell : cells) width += cell.width + 2;
    return std::string(width - 2, '=') + "\n";
  }
};

/// The unit in which all counts of operations are at least one.
std::pair<double, std::string> flops_unit(int64_t least) {
  constexpr std::array kUnits = {"FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"};
  const double thousands = std::clamp(std::log10(static_cast<double>(least)) / 3, 0.0, kUnits.size() - 1.0);
  return {std::pow(10, std::floor(thousands) * -3), kUnits[static_cast<size_t>(thousands)]};
}

}  // namespace

std::string ProfileAverages::table(const ProfileTableOptions& options) const {
  if (options.time_unit && *options.time_unit != "s" && *options.time_unit != "ms" && *options.time_unit != "us")
    raise<ConfigError>("table: time_unit is '{}', expected s, ms or us", *options.time_unit);
  std::vector<const ProfileAverage*> rows;
  for (const auto& row : *this) rows.push_back(&row);
  if (options.sort_by) {
    const auto column = column_of(*options.sort_by);
    std::stable_sort(rows.begin(), rows.end(), [&](const auto* a, const auto* b) { return column(*a) > column(*b); });
  }
  if (rows.empty()) return "";

  bool device_time = false, device_memory = false, shapes = false, stacks = false;
  size_t name_width = 0, shapes_width = 0, stack_width = 0;
  int64_t least_flops = 0;
  double cpu_us = 0, device_us = 0;
  for (const auto* row : rows) {
    device_time |= row->self_device_time_total > 0;
    device_memory |= row->self_device_memory_usage > 0;
    shapes |= row->input_shapes.size() > std::string_view("[]").size();
    stacks |= !row->stack.empty();
    name_width = std::max(name_width, row->key.size() + 4);
    shapes_width = std::max(shapes_width, row->input_shapes.size() + 4);
    for (const auto& entry : row->stack) stack_width = std::max(stack_width, entry.size() + 4);
    if (row->flops > 0) least_flops = least_flops == 0 ? row->flops : std::min(least_flops, row->flops);
    cpu_us += row->self_cpu_time_total;
    if (row->device_type != c10::DeviceType::CPU && !row->is_user_annotation) device_us += row->self_device_time_total;
  }
  name_width = std::min(name_width, static_cast<size_t>(options.max_name_column_width));
  shapes_width = std::min(shapes_width, static_cast<size_t>(options.max_shapes_column_width));
  stack_width = std::min(stack_width, static_cast<size_t>(options.max_src_column_width));
  const bool flops = context_.flops && least_flops > 0;
  const auto [flops_scale, flops_title] = flops ? flops_unit(least_flops) : std::pair(1.0, std::string());
  std::string device = context_.device;
  std::transform(device.begin(), device.end(), device.begin(), [](unsigned char c) { return std::toupper(c); });

  TableLayout layout;
  layout.add("Name", name_width);
  for (const char* title : {"Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"}) layout.add(title);
  if (device_time)
    for (const auto& title : {"Self " + device, "Self " + device + " %", device + " total", device + " time avg"})
      layout.add(title);
  if (context_.memory) {
    layout.add("CPU Mem");
    layout.add("Self CPU Mem");
    if (device_memory && !device.empty()) {
      layout.add(device + " Mem");
      layout.add("Self " + device + " Mem");
    }
  }
  layout.add("# of Calls");
  if (shapes) layout.add("Input Shapes", shapes_width);
  // PyTorch sets the next two widths and titles in this order, and their values the other way round.
  if (stacks) layout.add("Source Location", stack_width, true);
  if (flops) layout.add("Total " + flops_title);

  std::string text;
  if (options.header) text += layout.double_rule() + *options.header + "\n";
  if (options.top_level_events_only)
    text += layout.double_rule() + "This report only display top-level ops statistics\n";
  text += layout.rule() + layout.titles() + layout.rule();
  int64_t printed = 0;
  for (const auto* row : rows) {
    if (printed == options.row_limit) break;
    if (options.top_level_events_only && !row->top_level) continue;
    ++printed;
    const auto time = [&](double us) { return time_text(us, options.time_unit); };
    std::vector<std::string> texts = {name_text(row->key, options.max_name_column_width),
                                      share_text(row->self_cpu_time_total, cpu_us),
                                      time(row->self_cpu_time_total),
                                      row->is_async ? "0" : share_text(row->cpu_time_total, cpu_us),
                                      time(row->cpu_time_total),
                                      time(row->cpu_time())};
    const auto put = [&](std::string more) { texts.push_back(std::move(more)); };
    if (device_time) {
      put(time(row->self_device_time_total));
      put(share_text(row->self_device_time_total, device_us));
      put(time(row->device_time_total));
      put(time(row->device_time()));
    }
    if (context_.memory) {
      put(bytes_text(row->cpu_memory_usage));
      put(bytes_text(row->self_cpu_memory_usage));
      if (device_memory && !device.empty()) {
        put(bytes_text(row->device_memory_usage));
        put(bytes_text(row->self_device_memory_usage));
      }
    }
    put(std::to_string(row->count));
    if (shapes) put(row->input_shapes.substr(0, shapes_width));
    if (flops) put(row->flops <= 0 ? "--" : fmt::format("{:8.3f}", static_cast<double>(row->flops) * flops_scale));
    if (stacks) put(row->stack.empty() ? "" : end_of(row->stack[0], stack_width));
    text += layout.line(texts);
    if (!stacks) continue;
    for (size_t i = 1; i < row->stack.size(); ++i) {
      std::vector<std::string> line(texts.size() - 1);
      line.push_back(end_of(row->stack[i], stack_width));
      text += layout.line(line);
    }
    text += layout.line(std::vector<std::string>(texts.size()));
  }
  text += layout.rule() + "Self CPU time total: " + time_text(cpu_us, options.time_unit) + "\n";
  if (device_time) text += "Self " + device + " time total: " + time_text(device_us, options.time_unit) + "\n";
  return text;
}

}  // namespace accelerate
