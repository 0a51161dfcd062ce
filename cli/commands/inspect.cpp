#include <cstdio>
#include <iostream>
#include <optional>

#include <nlohmann/json.hpp>

#include "accelerate/bigmodel/sizes.hpp"
#include "command.hpp"
#include "formats/inspect/inspect.hpp"
#include "input/plain_text.hpp"
#include "utils/raise.hpp"

namespace {

using accelerate::formats::InspectedPart;
using accelerate::formats::Inspection;
using nlohmann::ordered_json;

std::string size_text(int64_t bytes) { return accelerate::convert_bytes(static_cast<double>(bytes)); }

size_t tensor_count(const Inspection& found) {
  size_t count = 0;
  for (const auto& part : found.parts) count += part.tensors.size();
  return count;
}

ordered_json json_of(const std::string& path, const Inspection& found, bool verified) {
  const auto text = [](const std::string& value) {
    return value.empty() ? ordered_json() : ordered_json(accelerate::plain_text(value));
  };
  const auto number = [](const std::optional<int64_t>& value) { return value ? ordered_json(*value) : ordered_json(); };
  const auto lines = [](const std::vector<std::string>& texts) {
    auto list = ordered_json::array();
    for (const auto& line : texts) list.push_back(accelerate::plain_lines(line));
    return list;
  };
  auto parts = ordered_json::array();
  for (const auto& part : found.parts) {
    auto tensors = ordered_json::array();
    for (const auto& tensor : part.tensors)
      tensors.push_back({{"name", accelerate::plain_text(tensor.name)},
                         {"dtype", text(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"bytes", tensor.bytes},
                         {"file", text(tensor.file)},
                         {"pieces", tensor.pieces}});
    parts.push_back({{"path", text(part.path)},
                     {"format", text(part.format)},
                     {"files", part.files},
                     {"bytes", part.bytes},
                     {"other_values", part.others},
                     {"unread", text(part.unread)},
                     {"tensors", std::move(tensors)}});
  }
  ordered_json verify = nullptr;
  if (verified) verify = {{"bytes_compared", found.checked_bytes}, {"bytes_without_checksums", found.unchecked_bytes}};
  return {{"path", text(path)},
          {"format", text(found.format)},
          {"layout", text(found.layout)},
          {"step", number(found.step)},
          {"iteration", number(found.iteration)},
          {"world_size", number(found.ranks)},
          {"written_by", text(found.written_by)},
          {"files", found.files},
          {"bytes", found.bytes},
          {"tensors", tensor_count(found)},
          {"verified", std::move(verify)},
          {"damage", lines(found.damage)},
          {"notes", lines(found.notes)},
          {"parts", std::move(parts)}};
}

std::string counted(int64_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

void print_part(const InspectedPart& part, bool is_only) {
  if (!is_only)
    std::cout << "\n"
              << accelerate::plain_text(part.path.empty() ? "." : part.path) << ": "
              << accelerate::plain_text(part.format) << ", " << counted(part.files, "file") << ", "
              << size_text(part.bytes) << "\n";
  size_t dtype_width = 5, shape_width = 5;
  std::vector<std::string> dtypes, shapes;
  for (const auto& tensor : part.tensors) {
    shapes.push_back(fmt::format("[{}]", fmt::join(tensor.shape, ", ")));
    dtypes.push_back(accelerate::plain_text(tensor.dtype));
    dtype_width = std::max(dtype_width, dtypes.back().size()),
    shape_width = std::max(shape_width, shapes.back().size());
  }
  for (size_t i = 0; i < part.tensors.size(); ++i) {
    const auto& tensor = part.tensors[i];
    std::string where;
    if (tensor.pieces > 1) where = fmt::format(" (in {} pieces)", tensor.pieces);
    else if (!tensor.file.empty()) where = fmt::format(" (in {})", accelerate::plain_text(tensor.file));
    std::cout << fmt::format("  {:<{}}  {:<{}}  {:>10}  {}{}\n", dtypes[i], dtype_width, shapes[i], shape_width,
                             size_text(tensor.bytes), accelerate::plain_text(tensor.name), where);
  }
  if (!part.unread.empty())
    std::cout << "  not all of it can be listed: " << accelerate::plain_lines(part.unread) << "\n";
  else if (part.tensors.empty()) std::cout << "  no tensors\n";
}

void print(const std::string& path, const Inspection& found, bool verified) {
  std::string about;
  if (!found.layout.empty()) about += ", " + accelerate::plain_text(found.layout);
  if (found.step) about += fmt::format(", step {}", *found.step);
  if (found.iteration) about += fmt::format(", iteration {}", *found.iteration);
  if (found.ranks) about += ", " + counted(*found.ranks, "rank");
  if (!found.written_by.empty()) about += ", by " + accelerate::plain_text(found.written_by);
  std::cout << accelerate::plain_text(path) << ": " << accelerate::plain_text(found.format) << about << "\n"
            << counted(static_cast<int64_t>(tensor_count(found)), "tensor") << ", " << counted(found.files, "file")
            << ", " << size_text(found.bytes) << "\n";
  for (const auto& part : found.parts) print_part(part, found.parts.size() == 1);
  std::cout << "\n";
  for (const auto& note : found.notes) std::cout << accelerate::plain_lines(note) << "\n";
  if (verified)
    std::cout << fmt::format("Compared with checksums: {}; without any: {}\n", size_text(found.checked_bytes),
                             size_text(found.unchecked_bytes));
  if (found.damage.empty())
    std::cout << "No damage was found" << (verified ? "" : "; --verify reads all bytes") << "\n";
  for (const auto& damage : found.damage) std::cout << "DAMAGED: " << accelerate::plain_lines(damage) << "\n";
}

int run_inspect(const cli::Arguments& arguments) {
  const bool verify = arguments.on("verify");
  const auto& path = arguments.positional.front();
  const auto found = accelerate::formats::inspect(path, {.verify = verify});
  if (arguments.on("json")) std::cout << json_of(path, found, verify).dump(2) << "\n";
  else print(path, found, verify);
  return found.damage.empty() ? 0 : accelerate::CheckpointError("").exit_code();
}

const cli::Registered kInspectCommand("inspect", run_inspect);

}  // namespace
