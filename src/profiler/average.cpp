#include <map>

#include "accelerate/profiler.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

void add(ProfileCosts& sum, const ProfileCosts& more) {
  sum.cpu_time_total += more.cpu_time_total;
  sum.self_cpu_time_total += more.self_cpu_time_total;
  sum.device_time_total += more.device_time_total;
  sum.self_device_time_total += more.self_device_time_total;
  sum.cpu_memory_usage += more.cpu_memory_usage;
  sum.self_cpu_memory_usage += more.self_cpu_memory_usage;
  sum.device_memory_usage += more.device_memory_usage;
  sum.self_device_memory_usage += more.self_device_memory_usage;
  sum.flops += more.flops;
}

/// As Python prints lists of lists.
std::string shapes_text(const std::vector<std::vector<int64_t>>& shapes) {
  std::string text = "[";
  for (const auto& shape : shapes) text += fmt::format("{}[{}]", text.size() > 1 ? ", " : "", fmt::join(shape, ", "));
  return text + "]";
}

ProfileAverage row_of(const ProfileEvent& event) {
  ProfileAverage row;
  static_cast<ProfileCosts&>(row) = static_cast<const ProfileCosts&>(event);
  row.key = event.name;
  row.count = 1;
  row.is_async = event.is_async;
  row.is_user_annotation = event.is_user_annotation;
  row.top_level = !event.parent;
  row.device_type = event.device_type;
  row.input_shapes = shapes_text(event.input_shapes);
  row.stack = event.stack;
  return row;
}

}  // namespace

ProfileAverages ProfileEvents::key_averages(bool group_by_input_shape, int64_t group_by_stack_n) const {
  ProfileAverages rows(context);
  std::map<std::vector<std::string>, size_t> places;
  for (const auto& event : events) {
    auto row = row_of(event);
    row.stack.resize(std::min(row.stack.size(), static_cast<size_t>(std::max<int64_t>(group_by_stack_n, 0))));
    if (!group_by_input_shape) row.input_shapes.clear();
    std::vector<std::string> key = {row.key, c10::DeviceTypeName(row.device_type), row.is_user_annotation ? "1" : "0",
                                    row.input_shapes};
    key.insert(key.end(), row.stack.begin(), row.stack.end());
    const auto [place, is_new] = places.try_emplace(std::move(key), rows.size());
    if (is_new) {
      rows.push_back(std::move(row));
      continue;
    }
    add(rows[place->second], row);
    ++rows[place->second].count;
  }
  return rows;
}

ProfileAverage ProfileEvents::total_average() const {
  ProfileAverage total;
  total.key = "Total";
  for (const auto& event : events) add(total, event);
  total.count = static_cast<int64_t>(events.size());
  return total;
}

std::string ProfileEvents::table(const ProfileTableOptions& options) const {
  ProfileAverages rows(context);
  for (const auto& event : events) rows.push_back(row_of(event));
  return rows.table(options);
}

double ProfileAverages::self_cpu_time_total() const {
  double sum = 0;
  for (const auto& row : *this) sum += row.self_cpu_time_total;
  return sum;
}

}  // namespace accelerate
