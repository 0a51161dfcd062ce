#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::formats {

/// A rectangular part of a tensor: where it begins and how far it reaches, per dimension. Both are empty for a scalar.
struct DcpBox {
  std::vector<int64_t> offsets;
  std::vector<int64_t> sizes;

  friend auto operator<=>(const DcpBox&, const DcpBox&) = default;
};

/// The whole of a tensor.
inline DcpBox whole(const std::vector<int64_t>& sizes) { return {std::vector<int64_t>(sizes.size(), 0), sizes}; }

/// Number of elements, or nothing if a size is negative or the product exceeds 2^63 - 1.
std::optional<int64_t> checked_numel(const std::vector<int64_t>& sizes);

/// The common part of two boxes of the same number of dimensions, or nothing if it has no elements. The common part of
/// two scalars is the scalar.
std::optional<DcpBox> intersect(const DcpBox& a, const DcpBox& b);

/// Whether `box` has the dimensions of a tensor of these sizes and lies within it.
bool lies_within(const DcpBox& box, const std::vector<int64_t>& sizes);

/// A pair of boxes that have an element in common, by their indices, or nothing. All have the same number of
/// dimensions.
std::optional<std::pair<size_t, size_t>> find_overlap(const std::vector<const DcpBox*>& boxes);

std::string to_string(const std::vector<int64_t>& numbers);  ///< "[3, 4]"
std::string to_string(const DcpBox& box);                    ///< "offsets [0, 4] sizes [3, 4]"

}  // namespace accelerate::formats
