#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/dcp/box.hpp"

namespace accelerate::formats {

/// The rule by which ranks hold the pieces of a tensor, as a layout has it: member p holds elements [p * each - begin,
/// (p + 1) * each - begin) of the tensor, row by row, as far as it has them, and is rank first + p * step. A tensor
/// that one rank has whole has one member.
struct DcpShards {
  int64_t begin = 0;  ///< where the tensor's first element lies among those that were cut together
  int64_t each = 1;
  int64_t members = 1, step = 1, first = 0;
  bool operator==(const DcpShards&) const = default;

  int64_t rank_of(int64_t member) const { return first + member * step; }
  /// Nothing for a rank that is no member.
  std::optional<int64_t> member_of(int64_t rank) const;
  /// Elements [first, second) of a tensor of so many, none where both are equal.
  std::pair<int64_t, int64_t> range_of(int64_t member, int64_t numel) const;
  /// How many members have some of a tensor of so many elements.
  int64_t holders(int64_t numel) const;
};

/// What is wrong with a rule for a tensor of these sizes and a job of so many ranks: "has …". Empty: members hold each
/// element once, and no product of the rule's numbers overflows.
std::string problem_of(const DcpShards& rule, const std::vector<int64_t>& sizes, int64_t ranks);

/// Elements [from, to) of a tensor, row by row, as rectangles in their order: the rest of a row, whole rows, the
/// beginning of a row, and so within each dimension.
std::vector<DcpBox> boxes_of_range(const std::vector<int64_t>& sizes, int64_t from, int64_t to);

/// Calls `take` with each member whose piece has elements of a box within a tensor, in their order. Takes time in
/// proportion to how many they are, however many have none.
void for_members_under(const DcpShards& rule, const std::vector<int64_t>& sizes, const DcpBox& box,
                       const std::function<void(int64_t member)>& take);

}  // namespace accelerate::formats
