#include "formats/dcp/layout.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <unordered_set>
#include <utility>

#include "formats/dcp/path_limits.hpp"
#include "formats/torch_container.hpp"
#include "input/json.hpp"
#include "utils/file_checksums.hpp"
#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr const char* kLayoutFormat = "accelerate layout";
constexpr int64_t kLayoutVersion = 1;
constexpr int64_t kMostLayoutRanks = int64_t{1} << 20;  // who looks at all of them ends
constexpr size_t kMostLayoutDims = 64;                  // LibTorch's own limit for most operators
constexpr int64_t kMostLayoutElementBytes = 16;

/// A tensor that one rank has whole.
DcpShards whole_on(int64_t rank, int64_t numel) { return {.each = std::max<int64_t>(numel, 1), .first = rank}; }

ordered_json entry_as_json(const DcpEntry& entry) {
  ordered_json result;
  auto& path = result["path"] = ordered_json::array();
  for (const auto& step : *entry.path) {
    if (const auto* index = std::get_if<int64_t>(&step)) path.push_back(*index);
    else path.push_back(std::get<std::string>(step));
  }
  const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
  if (!info) {
    result["rank"] = rank_of_data_file(std::get<DcpLocation>(entry.content).file);
    return result;
  }
  result["dtype"] = info->dtype;
  result["sizes"] = info->sizes;
  const auto& rule = *info->shards;
  if (rule == whole_on(rule.first, checked_numel(info->sizes).value_or(0))) result["rank"] = rule.first;
  else
    result["shards"] = {{"begin", rule.begin},
                        {"each", rule.each},
                        {"members", rule.members},
                        {"step", rule.step},
                        {"first", rule.first}};
  return result;
}

class LayoutReader {
 public:
  LayoutReader(std::string_view text, const std::string& file)
      : text_(text), file_(file), paths_(static_cast<int64_t>(text.size()) / 4) {}

  DcpMetadata read() {
    std::string problem;
    const auto root = parse_json<json>(text_, &problem, {.unique_keys = true});
    if (root.is_discarded()) fail("it {}", problem);
    if (!root.is_object() || root.value("format", json()) != kLayoutFormat)
      fail("it is {}, expected an object with the format '{}'", show_json(root), kLayoutFormat);
    if (const auto version = number(root, "version", "it"); version != kLayoutVersion)
      fail("it is of version {}, and this program reads version {}; take a newer one", version, kLayoutVersion);
    DcpMetadata result;
    result.checksum = crc32c::of(text_);
    result.ranks = ranks_ = number(root, "ranks", "it");
    if (ranks_ < 1 || ranks_ > kMostLayoutRanks) fail("it is of {} ranks, expected 1 to {}", ranks_, kMostLayoutRanks);
    const auto& entries = member(root, "entries", "it");
    if (!entries.is_array()) fail("its 'entries' are {}, expected a list", show_json(entries));
    expect_keys(root, 4, "it");
    for (const auto& entry : entries) result.entries.push_back(read_entry(entry, result.entries.size()));
    return result;
  }

 private:
  template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> what, Args&&... args) const {
    raise<CheckpointError>("layout '{}': {}. It is damaged, or no layout: copy the checkpoint again.", file_,
                           fmt::format(what, std::forward<Args>(args)...));
  }

  const json& member(const json& from, const char* key, const std::string& of) const {
    const auto found = from.find(key);
    if (found == from.end()) fail("{} has no '{}'", of, key);
    return *found;
  }
  int64_t number(const json& from, const char* key, const std::string& of) const {
    const auto& value = member(from, key, of);
    const auto result = whole_number(value);
    if (!result) fail("{} has {} as '{}', expected a whole number", of, show_json(value), key);
    return *result;
  }
  /// What is not known may mean something.
  void expect_keys(const json& object, size_t count, const std::string& of) const {
    if (object.size() != count) fail("{} has {} members, expected {}: {}", of, object.size(), count, show_json(object));
  }

  DcpEntry read_entry(const json& from, size_t index) {
    const auto numbered = fmt::format("entry {}", index);
    if (!from.is_object()) fail("{} is {}, expected an object", numbered, show_json(from));
    DcpEntry entry{.name = {}, .path = read_path(member(from, "path", numbered), numbered), .content = {}};
    entry.name = dcp_name(*entry.path);
    const auto of = fmt::format("'{}'", entry.name.substr(0, 200));
    if (!names_.insert(entry.name).second) fail("the name {} occurs twice", of);
    if (!from.contains("sizes")) {
      entry.content = DcpLocation{dcp_data_file(rank(from, of)), 0, 0};
      expect_keys(from, 2, of);
      return entry;
    }
    DcpTensorInfo info;
    info.sizes = read_sizes(from["sizes"], of);
    const auto numel = checked_numel(info.sizes);
    if (!numel || *numel > std::numeric_limits<int64_t>::max() / kMostLayoutElementBytes)
      fail("{} has the size {}, expected sizes from 0 and fewer than 2^63 bytes in all", of, info.sizes);
    const auto& dtype = member(from, "dtype", of);
    info.dtype = dtype.is_string() ? dtype.get<std::string>() : "";
    if (torch_element_bytes(info.dtype) == 0)
      fail("{} has the dtype {}, expected an element type of torch", of, show_json(dtype));
    if (from.contains("rank")) info.shards = whole_on(rank(from, of), *numel);
    else info.shards = read_shards(member(from, "shards", of), of);
    expect_keys(from, 4, of);
    if (const auto wrong = problem_of(*info.shards, info.sizes, ranks_); !wrong.empty()) fail("{} {}", of, wrong);
    entry.content = std::move(info);
    return entry;
  }

  DcpPath read_path(const json& from, const std::string& of) {
    DcpPath path;
    if (from.is_array() && from.size() <= DcpPathLimits::kMostSteps)
      for (const auto& step : from) {
        if (step.is_string()) path.emplace_back(step.get<std::string>());
        else if (const auto index = whole_number(step)) path.emplace_back(*index);
        else fail("{} has {} in its path, expected keys and indices", of, show_json(step));
      }
    if (path.empty() || !std::holds_alternative<std::string>(path.front()))
      fail("{} has the path {}, expected a key and up to {} further steps", of, show_json(from),
           DcpPathLimits::kMostSteps - 1);
    if (const auto wrong = paths_.add(path); !wrong.empty()) fail("the path of {} {}", of, wrong);
    return path;
  }

  std::vector<int64_t> read_sizes(const json& from, const std::string& of) const {
    std::vector<int64_t> sizes;
    if (!from.is_array() || from.size() > kMostLayoutDims)
      fail("{} has the size {}, expected a list of at most {} numbers", of, show_json(from), kMostLayoutDims);
    for (const auto& size : from) sizes.push_back(whole_number(size).value_or(-1));
    return sizes;
  }

  DcpShards read_shards(const json& from, const std::string& of) const {
    if (!from.is_object()) fail("{} has the shards {}, expected an object", of, show_json(from));
    expect_keys(from, 5, of);
    return {.begin = number(from, "begin", of),
            .each = number(from, "each", of),
            .members = number(from, "members", of),
            .step = number(from, "step", of),
            .first = number(from, "first", of)};
  }

  int64_t rank(const json& from, const std::string& of) const {
    const auto rank = number(from, "rank", of);
    if (rank < 0 || rank >= ranks_) fail("{} is rank {}'s, expected one of {} ranks", of, rank, ranks_);
    return rank;
  }

  std::string_view text_;
  const std::string& file_;
  DcpPathLimits paths_;
  std::unordered_set<std::string> names_;
  int64_t ranks_ = 0;
};

}  // namespace

std::string dcp_data_file(int64_t rank) { return fmt::format("__{}_0.distcp", rank); }

int64_t rank_of_data_file(const std::string& name) {
  int64_t rank = 0;
  const auto end = std::from_chars(name.data() + std::min<size_t>(2, name.size()), name.data() + name.size(), rank).ptr;
  if (name != dcp_data_file(rank) || !end) throw InternalError("'" + name + "' is no name of a rank's file");
  return rank;
}

std::string dcp_name(const DcpPath& path) {
  std::string name;
  for (const auto& step : path) {
    const auto* key = std::get_if<std::string>(&step);
    name += (name.empty() ? "" : ".") + (key ? *key : std::to_string(std::get<int64_t>(step)));
  }
  return name;
}

DcpLayout make_dcp_layout(const std::vector<DcpEntry>& entries, int64_t ranks) {
  DcpLayout layout;
  layout.text = fmt::format("{{\"format\": \"{}\", \"version\": {}, \"ranks\": {}, \"entries\": [", kLayoutFormat,
                            kLayoutVersion, ranks);
  for (const auto& entry : entries) {
    layout.text += &entry == entries.data() ? "\n" : ",\n";
    try {
      layout.text += entry_as_json(entry).dump();
    } catch (const json::exception&) {
      raise<CheckpointError>("writing a layout: the name '{}' is not UTF-8. Rename it.", show_json(json(entry.name)));
    }
  }
  layout.text += "\n]}\n";
  layout.metadata = parse_dcp_layout(layout.text, "to be written");
  return layout;
}

DcpMetadata parse_dcp_layout(std::string_view text, const std::string& file) { return LayoutReader(text, file).read(); }

std::vector<DcpHeldItem> held_by(const DcpMetadata& layout, int64_t rank) {
  std::vector<DcpHeldItem> items;
  const auto file = dcp_data_file(rank);
  for (size_t i = 0; i < layout.entries.size(); ++i) {
    const auto* info = std::get_if<DcpTensorInfo>(&layout.entries[i].content);
    if (!info) {
      if (std::get<DcpLocation>(layout.entries[i].content).file == file) items.push_back({.entry = i, .box = {}});
      continue;
    }
    const auto member = info->shards->member_of(rank);
    if (!member) continue;
    const int64_t numel = *checked_numel(info->sizes);
    if (numel == 0) {  // there is a place for it all the same
      items.push_back({.entry = i, .box = whole(info->sizes)});
      continue;
    }
    const auto [from, to] = info->shards->range_of(*member, numel);
    int64_t number = 0;
    for (auto& box : boxes_of_range(info->sizes, from, to)) items.push_back({i, number++, std::move(box)});
  }
  return items;
}

}  // namespace accelerate::formats
