/// The plan of a sharded checkpoint without its elements: LLaMA-3.1-405B with AdamW's states on 16,384 ranks, from the
/// shapes to the layout's file and ranks' indexes, and back to who reads what from where on 12,288.
///
/// usage: bench_dry_plan write|read FOLDER [RANKS [READERS]]
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "formats/dcp/folder.hpp"
#include "formats/dcp/item_index.hpp"
#include "formats/dcp/layout.hpp"

using namespace accelerate::formats;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using Sizes = std::vector<int64_t>;

namespace {

/// Bytes around an item's elements, as torch's archives have them.
constexpr int64_t kAroundItem = 1024;

double seconds_since(Clock::time_point begun) { return std::chrono::duration<double>(Clock::now() - begun).count(); }

/// Of this process, at most.
double peak_megabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  return 0;
}

/// Parameters that are cut together: those of each layer, and the rest.
std::vector<std::vector<std::pair<std::string, Sizes>>> units_of_llama_405b() {
  constexpr int64_t kLayers = 126, kHidden = 16384, kIntermediate = 53248, kKeys = kHidden / 128 * 8, kWords = 128256;
  std::vector<std::vector<std::pair<std::string, Sizes>>> units;
  for (int64_t i = 0; i < kLayers; ++i) {
    const auto name = [&](const char* what) { return fmt::format("layers.{}.{}.weight", i, what); };
    units.push_back({{name("self_attn.q_proj"), {kHidden, kHidden}},
                     {name("self_attn.k_proj"), {kKeys, kHidden}},
                     {name("self_attn.v_proj"), {kKeys, kHidden}},
                     {name("self_attn.o_proj"), {kHidden, kHidden}},
                     {name("mlp.gate_proj"), {kIntermediate, kHidden}},
                     {name("mlp.up_proj"), {kIntermediate, kHidden}},
                     {name("mlp.down_proj"), {kHidden, kIntermediate}},
                     {name("input_layernorm"), {kHidden}},
                     {name("post_attention_layernorm"), {kHidden}}});
  }
  units.push_back(
      {{"embed_tokens.weight", {kWords, kHidden}}, {"norm.weight", {kHidden}}, {"lm_head.weight", {kWords, kHidden}}});
  return units;
}

/// Weights, AdamW's two moments, its counts of steps and its options, as a state dict of both has them.
std::vector<DcpEntry> entries_of(int64_t ranks) {
  std::vector<DcpEntry> entries;
  const auto add = [&](DcpPath path, std::variant<DcpTensorInfo, DcpLocation> content) {
    auto name = dcp_name(path);
    entries.push_back({std::move(name), std::move(path), std::move(content)});
  };
  for (const auto& unit : units_of_llama_405b()) {
    int64_t all = 0, begin = 0;
    for (const auto& [name, sizes] : unit) all += *checked_numel(sizes);
    for (const auto& [name, sizes] : unit) {
      DcpTensorInfo info{.sizes = sizes, .chunks = {}};
      info.shards = DcpShards{.begin = begin, .each = (all + ranks - 1) / ranks, .members = ranks};
      begin += *checked_numel(sizes);
      add({"model", name}, info);
      for (const auto* state : {"exp_avg", "exp_avg_sq"}) add({"optimizer", "state", name, state}, info);
      add({"optimizer", "state", name, "step"}, DcpTensorInfo{.sizes = {}, .chunks = {}, .shards = DcpShards{}});
    }
  }
  for (const auto* option : {"betas", "eps", "lr", "params", "weight_decay"})
    add({"optimizer", "param_groups", int64_t{0}, option}, DcpLocation{dcp_data_file(0), 0, 0});
  return entries;
}

/// What a rank's file would have, without its elements: they are holes.
void write_rank(const fs::path& folder, const DcpMetadata& layout, int64_t rank, DcpItemIndex& index) {
  index = {.rank = rank, .layout = layout.checksum, .items = {}};
  int64_t at = 0;
  for (const auto& item : held_by(layout, rank)) {
    const int64_t length = kAroundItem + 4 * *checked_numel(item.box.sizes);
    index.items.push_back({static_cast<uint32_t>(item.entry), static_cast<uint32_t>(item.box_number), at, length});
    at += length;
  }
  if (folder.empty()) return;
  const auto path = folder / dcp_data_file(rank);
  std::ofstream(path).flush();
  fs::resize_file(path, static_cast<uintmax_t>(at));
  std::ofstream(path, std::ios::binary | std::ios::app) << format_item_index(index);
}

/// The readers whose plans are made.
std::vector<int64_t> sample(int64_t readers) { return {0, 1, readers / 3, readers / 2, readers - 1}; }

void write(const fs::path& folder, int64_t ranks, int64_t readers) {
  auto begun = Clock::now();
  const auto layout = make_dcp_layout(entries_of(ranks), ranks);
  fmt::print("layout made: {:.3f} s, {} entries\n", seconds_since(begun), layout.metadata.entries.size());
  begun = Clock::now();
  fs::create_directories(folder);
  std::ofstream(folder / kDcpLayoutFile, std::ios::binary) << layout.text;
  fmt::print("layout written: {:.3f} s, {} bytes\n", seconds_since(begun), layout.text.size());

  begun = Clock::now();
  DcpItemIndex index;
  write_rank({}, layout.metadata, ranks / 2, index);
  fmt::print("one rank's index: {:.4f} s, {} items, {} bytes\n", seconds_since(begun), index.items.size(),
             format_item_index(index).size());

  // All ranks', one after the other in this process, which in a job each of them does for itself.
  begun = Clock::now();
  int64_t items = 0, bytes = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    write_rank({}, layout.metadata, rank, index);
    items += static_cast<int64_t>(index.items.size());
    bytes += static_cast<int64_t>(format_item_index(index).size());
  }
  fmt::print("all {} ranks' indexes: {:.3f} s, {} items, {} bytes\n", ranks, seconds_since(begun), items, bytes);

  std::set<int64_t> files{0};
  for (const int64_t reader : sample(readers))
    for (int64_t rank = reader * ranks / readers - 1; rank <= (reader + 1) * ranks / readers + 1; ++rank)
      files.insert(std::clamp<int64_t>(rank, 0, ranks - 1));
  begun = Clock::now();
  for (const int64_t rank : files) write_rank(folder, layout.metadata, rank, index);
  fmt::print("{} ranks' files with holes for elements: {:.3f} s\n", files.size(), seconds_since(begun));
  fmt::print(".metadata would list {} parts: about {} MB at 150 bytes each\n", items, items * 150 / 1'000'000);
}

void read(const fs::path& folder, int64_t readers) {
  auto begun = Clock::now();
  const DcpFolder places(folder);
  fmt::print("layout read: {:.3f} s, {} entries of {} ranks\n", seconds_since(begun), places.metadata().entries.size(),
             places.metadata().ranks);
  for (const int64_t reader : sample(readers)) {
    begun = Clock::now();
    const auto opened = InputFile::times_opened();
    int64_t boxes = 0, parts = 0, bytes = 0;
    for (const auto& entry : places.metadata().entries) {
      const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
      if (!info) {
        bytes += places.place_of(entry).length;
        continue;
      }
      // Cut anew, for as many ranks as there are now.
      auto rule = *info->shards;
      if (rule.members > 1) rule.each = (rule.each * rule.members + readers - 1) / readers, rule.members = readers;
      const auto member = rule.members > 1 ? reader : 0;
      const auto [from, to] = rule.range_of(member, *checked_numel(info->sizes));
      int64_t wanted = to - from;
      for (const auto& box : boxes_of_range(info->sizes, from, to)) {
        ++boxes;
        for (const auto& part : places.parts_under(entry, box)) {
          ++parts;
          const int64_t common = *checked_numel(intersect(part.box, box)->sizes);
          wanted -= common, bytes += 4 * common;
        }
      }
      if (wanted != 0) throw std::runtime_error("not all of '" + entry.name + "' was found");
    }
    fmt::print("plan of rank {} of {}: {:.4f} s, {} boxes of {} parts, {} MB, {} files opened\n", reader, readers,
               seconds_since(begun), boxes, parts, bytes / 1'000'000, InputFile::times_opened() - opened);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const int64_t ranks = argc > 3 ? std::stoll(argv[3]) : 16384, readers = argc > 4 ? std::stoll(argv[4]) : 12288;
  const auto begun = Clock::now();
  if (std::string(argv[1]) == "write") write(argv[2], ranks, readers);
  else read(argv[2], readers);
  fmt::print("{}: {:.3f} s, {:.0f} MB at most\n", argv[1], seconds_since(begun), peak_megabytes());
}
