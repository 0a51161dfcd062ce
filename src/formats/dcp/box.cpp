#include "formats/dcp/box.hpp"
#include "utils/raise.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace accelerate::formats {

std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes) {
  int64_t product = 1;
  bool overflow = false, empty = false;
  for (const auto size : sizes) {
    if (size < 0) return std::nullopt;
    empty = empty || size == 0;
    overflow = __builtin_mul_overflow(product, size, &product) || overflow;
  }
  if (empty) return 0;
  return overflow ? std::nullopt : std::optional(product);
}

std::optional<DcpBox> intersect(const DcpBox& a, const DcpBox& b) {
  DcpBox common;
  for (size_t dim = 0; dim < a.offsets.size(); ++dim) {
    const auto begin = std::max(a.offsets[dim], b.offsets[dim]);
    const auto end = std::min(a.offsets[dim] + a.sizes[dim], b.offsets[dim] + b.sizes[dim]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

bool lies_within(const DcpBox& box, const std::vector<int64_t>& sizes) {
  if (box.offsets.size() != sizes.size() || box.sizes.size() != sizes.size()) return false;
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    if (box.offsets[dim] < 0 || box.sizes[dim] < 0 || box.offsets[dim] > sizes[dim] ||
        box.sizes[dim] > sizes[dim] - box.offsets[dim])
      return false;
  return true;
}

std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const DcpBox*>& boxes) {
  if (boxes.size() < 2) return std::nullopt;
  const size_t dims = boxes[0]->offsets.size();
  if (dims == 0) return std::pair<size_t, size_t>{0, 1};  // a scalar has room for one
  // Sweep along the dimension with the most different beginnings: boxes can only overlap those that are still open
  // there.
  size_t sweep = 0, most = 0;
  for (size_t dim = 0; dim < dims; ++dim) {
    std::set<int64_t> begins;
    for (const auto* box : boxes) begins.insert(box->offsets[dim]);
    if (begins.size() > most) most = begins.size(), sweep = dim;
  }
  std::vector<size_t> order(boxes.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return boxes[a]->offsets[sweep] < boxes[b]->offsets[sweep]; });
  std::multimap<int64_t, size_t> open;  // end -> box
  for (const auto index : order) {
    const auto& box = *boxes[index];
    open.erase(open.begin(), open.upper_bound(box.offsets[sweep]));
    for (const auto& [end, other] : open)
      if (intersect(box, *boxes[other])) return std::pair{std::min(index, other), std::max(index, other)};
    open.emplace(box.offsets[sweep] + box.sizes[sweep], index);
  }
  return std::nullopt;
}

std::string to_string(const std::vector<int64_t>& numbers) { return fmt::format("{}", numbers); }

std::string to_string(const DcpBox& box) { return fmt::format("offsets {} sizes {}", box.offsets, box.sizes); }

}  // namespace accelerate::formats
