#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::models {

/// From tokens to ids: a hash table with open addressing that holds ids only, an eighth of what a map takes.
class TokenIndex {
 public:
  /// @param tokens  by id, which stay where they are; empty ones are left out. The first of equal ones is found.
  explicit TokenIndex(const std::vector<std::string>& tokens)
      : tokens_(tokens), slots_(std::bit_ceil(tokens.size() * 2 + 2), -1) {
    for (size_t id = 0; id < tokens.size(); ++id)
      if (int32_t& slot = slots_[slot_of(tokens[id])]; slot < 0 && !tokens[id].empty()) slot = static_cast<int32_t>(id);
  }
  TokenIndex(const TokenIndex&) = delete;
  TokenIndex& operator=(const TokenIndex&) = delete;

  /// @return -1 if there is none
  int32_t find(std::string_view token) const { return slots_[slot_of(token)]; }

 private:
  /// The slot where the token is, or would be put.
  size_t slot_of(std::string_view token) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = std::hash<std::string_view>()(token) & mask;
    while (slots_[slot] >= 0 && tokens_[static_cast<size_t>(slots_[slot])] != token) slot = (slot + 1) & mask;
    return slot;
  }

  const std::vector<std::string>& tokens_;
  std::vector<int32_t> slots_;
};

}  // namespace accelerate::models
