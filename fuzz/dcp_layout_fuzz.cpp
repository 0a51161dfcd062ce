#include <cstdlib>

#include "accelerate/utils/error.hpp"
#include "formats/dcp/layout.hpp"

// Any text is a layout of which the properties below hold, or a CheckpointError.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate;
  using namespace accelerate::formats;
  try {
    const auto layout = parse_dcp_layout({reinterpret_cast<const char*>(data), size}, "fuzz");
    if (layout.ranks < 1) std::abort();
    for (const auto& entry : layout.entries) {
      const auto* info = std::get_if<DcpTensorInfo>(&entry.content);
      if (!info) {
        const auto rank = rank_of_data_file(std::get<DcpLocation>(entry.content).file);
        if (rank < 0 || rank >= layout.ranks) std::abort();
        continue;
      }
      const auto numel = checked_numel(info->sizes);
      if (!numel || !info->shards || !problem_of(*info->shards, info->sizes, layout.ranks).empty()) std::abort();
      if (*numel == 0) continue;
      // The first and the last element have a holder, and are in its boxes.
      for (const int64_t element : {int64_t{0}, *numel - 1}) {
        const auto one = boxes_of_range(info->sizes, element, element + 1);
        int64_t holders = 0;
        for_members_under(*info->shards, info->sizes, one.at(0), [&](int64_t member) {
          ++holders;
          const int64_t rank = info->shards->rank_of(member);
          if (rank < 0 || rank >= layout.ranks || info->shards->member_of(rank) != member) std::abort();
          const auto [from, to] = info->shards->range_of(member, *numel);
          int64_t elements = 0, hits = 0;
          for (const auto& box : boxes_of_range(info->sizes, from, to)) {
            if (!lies_within(box, info->sizes)) std::abort();
            elements += *checked_numel(box.sizes);
            hits += intersect(box, one[0]).has_value();
          }
          if (elements != to - from || hits != 1) std::abort();
        });
        if (holders != 1) std::abort();
      }
    }
    for (const int64_t rank : {int64_t{0}, layout.ranks - 1})
      for (const auto& item : held_by(layout, rank))
        if (item.entry >= layout.entries.size()) std::abort();
    // A parsed layout can be written, and reads the same.
    const auto again = make_dcp_layout(layout.entries, layout.ranks).text;
    if (make_dcp_layout(parse_dcp_layout(again, "again").entries, layout.ranks).text != again) std::abort();
  } catch (const CheckpointError&) {
  }
  return 0;
}
