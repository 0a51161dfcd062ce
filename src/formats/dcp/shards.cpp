#include "formats/dcp/shards.hpp"

#include <algorithm>

#include "utils/raise.hpp"

namespace accelerate::formats {
namespace {

/// `box` has the dimensions before `dim` already.
void split_range(const std::vector<int64_t>& sizes, size_t dim, int64_t from, int64_t to, DcpBox box,
                 std::vector<DcpBox>& result) {
  if (from >= to) return;
  if (dim == sizes.size()) return result.push_back(std::move(box));
  int64_t row = 1;
  for (size_t d = dim + 1; d < sizes.size(); ++d) row *= sizes[d];
  const auto within = [&](int64_t index, int64_t begin, int64_t end) {
    DcpBox one = box;
    one.offsets.push_back(index), one.sizes.push_back(1);
    split_range(sizes, dim + 1, begin, end, std::move(one), result);
  };
  const int64_t first = from / row, last = to / row;
  if (first == last) return within(first, from % row, to % row);
  if (from % row) within(first, from % row, row);
  const int64_t whole = first + (from % row != 0);
  if (whole < last) {
    DcpBox rows = box;
    rows.offsets.push_back(whole), rows.sizes.push_back(last - whole);
    for (size_t d = dim + 1; d < sizes.size(); ++d) rows.offsets.push_back(0), rows.sizes.push_back(sizes[d]);
    result.push_back(std::move(rows));
  }
  if (to % row) within(last, 0, to % row);
}

/// The first element of the box that does not lie before `flat`, both counted row by row; -1: there is none.
int64_t next_under(int64_t flat, const std::vector<int64_t>& sizes, const DcpBox& box) {
  const size_t dims = sizes.size();
  if (dims == 0) return flat == 0 ? 0 : -1;
  std::vector<int64_t> at(dims);
  for (size_t dim = dims; dim-- > 0; flat /= sizes[dim]) at[dim] = flat % sizes[dim];
  if (flat > 0) return -1;  // behind the tensor
  const auto end = [&](size_t dim) { return box.offsets[dim] + box.sizes[dim]; };
  const auto begin_from = [&](size_t dim) {
    std::copy(box.offsets.begin() + static_cast<int64_t>(dim), box.offsets.end(),
              at.begin() + static_cast<int64_t>(dim));
  };
  for (size_t dim = 0; dim < dims; ++dim) {
    if (at[dim] < box.offsets[dim]) {
      begin_from(dim);
      break;
    }
    if (at[dim] < end(dim)) continue;
    // Behind the box in this dimension: on in one before, from the box's beginning in those behind that.
    do {
      if (dim-- == 0) return -1;
    } while (++at[dim] == end(dim));
    begin_from(dim + 1);
    break;
  }
  int64_t result = 0;
  for (size_t dim = 0; dim < dims; ++dim) result = result * sizes[dim] + at[dim];
  return result;
}

}  // namespace

std::optional<int64_t> DcpShards::member_of(int64_t rank) const {
  if (rank < first || (rank - first) % step != 0 || (rank - first) / step >= members) return std::nullopt;
  return (rank - first) / step;
}

std::pair<int64_t, int64_t> DcpShards::range_of(int64_t member, int64_t numel) const {
  const int64_t from = member * each - begin;
  return {std::clamp<int64_t>(from, 0, numel), std::clamp<int64_t>(from + each, 0, numel)};
}

int64_t DcpShards::holders(int64_t numel) const {
  return numel == 0 ? 0 : (begin + numel - 1) / each - begin / each + 1;
}

std::string problem_of(const DcpShards& rule, const std::vector<int64_t>& sizes, int64_t ranks) {
  const auto numel = checked_numel(sizes);
  if (!numel) return fmt::format("has the size {}, expected sizes from 0 and fewer than 2^63 elements", sizes);
  if (rule.begin < 0 || rule.each < 1 || rule.members < 1 || rule.step < 1 || rule.first < 0)
    return fmt::format(
        "begins at {} in pieces of {} elements, of {} members, each {} ranks behind the one before, from rank {} on: "
        "expected a beginning and a rank from 0, and the others from 1",
        rule.begin, rule.each, rule.members, rule.step, rule.first);
  int64_t all = 0, end = 0, last = 0;
  if (__builtin_mul_overflow(rule.each, rule.members, &all) || __builtin_add_overflow(rule.begin, *numel, &end) ||
      end > all)
    return fmt::format("has {} elements from {} on, expected no more than the {} pieces of {} that ranks hold", *numel,
                       rule.begin, rule.members, rule.each);
  if (__builtin_mul_overflow(rule.members - 1, rule.step, &last) || __builtin_add_overflow(last, rule.first, &last) ||
      last >= ranks)
    return fmt::format("has {} members, each {} ranks behind the one before, from rank {} on, expected ranks below {}",
                       rule.members, rule.step, rule.first, ranks);
  return {};
}

std::vector<DcpBox> boxes_of_range(const std::vector<int64_t>& sizes, int64_t from, int64_t to) {
  std::vector<DcpBox> boxes;
  split_range(sizes, 0, from, to, {}, boxes);
  return boxes;
}

void for_members_under(const DcpShards& rule, const std::vector<int64_t>& sizes, const DcpBox& box,
                       const std::function<void(int64_t member)>& take) {
  if (*checked_numel(box.sizes) == 0) return;
  const int64_t numel = *checked_numel(sizes);
  for (int64_t at = 0; at < numel && (at = next_under(at, sizes, box)) >= 0;) {
    const int64_t member = (rule.begin + at) / rule.each;
    take(member);
    at = rule.range_of(member, numel).second;
  }
}

}  // namespace accelerate::formats
