#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <string_view>
#include <vector>

namespace accelerate::models {

/// Finds the longest entry that a string starts with.
///
/// A hash table with open addressing. The hash of a prefix follows from that of the prefix one byte shorter, so that
/// the hashes of all prefixes of a word cost one pass and a whole word that is in the vocabulary, the usual case, one
/// look-up.
class PieceTable {
 public:
  struct Prefix {
    int32_t id;  ///< -1 if there is none.
    size_t bytes;
  };

  /// `piece` must stay where it is as long as this table is used. Empty pieces match nothing and are left out.
  void insert(std::string_view piece, int32_t id) {
    if (piece.empty()) return;
    if ((count_ + 1) * 2 > slots_.size()) grow();
    ++count_;
    longest_ = std::max(longest_, piece.size());
    uint64_t hash = kSeed;
    for (const char c : piece) hash = extend(hash, c);
    place({piece, hash, id});
  }

  Prefix longest_prefix(std::string_view word) const {
    constexpr size_t kMost = 256;  // longer pieces than this are found as well, only slower
    std::array<uint64_t, kMost> hashes;
    const size_t most = std::min(word.size(), longest_);
    if (most > kMost) return longest_prefix_by_scan(word, most);
    uint64_t hash = kSeed;
    for (size_t i = 0; i < most; ++i) hashes[i] = hash = extend(hash, word[i]);
    for (size_t bytes = most; bytes > 0; --bytes)
      if (const int32_t id = find(word.substr(0, bytes), hashes[bytes - 1]); id >= 0) return {id, bytes};
    return {-1, 0};
  }

 private:
  struct Slot {
    std::string_view piece;
    uint64_t hash = 0;
    int32_t id = -1;
  };

  static constexpr uint64_t kSeed = 0xcbf29ce484222325;
  static uint64_t extend(uint64_t hash, char c) {
    return (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  }  // FNV-1a
  /// FNV's low bits alone spread badly.
  size_t slot_of(uint64_t hash) const { return static_cast<size_t>((hash ^ (hash >> 32)) & (slots_.size() - 1)); }

  int32_t find(std::string_view piece, uint64_t hash) const {
    for (size_t slot = slot_of(hash); slots_[slot].id >= 0; slot = (slot + 1) & (slots_.size() - 1))
      if (slots_[slot].hash == hash && slots_[slot].piece == piece) return slots_[slot].id;
    return -1;
  }

  Prefix longest_prefix_by_scan(std::string_view word, size_t most) const {
    Prefix best{-1, 0};
    uint64_t hash = kSeed;
    for (size_t bytes = 1; bytes <= most; ++bytes) {
      hash = extend(hash, word[bytes - 1]);
      if (const int32_t id = find(word.substr(0, bytes), hash); id >= 0) best = {id, bytes};
    }
    return best;
  }

  void place(Slot entry) {
    size_t slot = slot_of(entry.hash);
    while (slots_[slot].id >= 0) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = entry;
  }

  void grow() {
    auto old = std::move(slots_);
    slots_.assign(std::max<size_t>(64, old.size() * 2), {});
    for (const auto& entry : old)
      if (entry.id >= 0) place(entry);
  }

  std::vector<Slot> slots_ = std::vector<Slot>(64);
  size_t count_ = 0;
  size_t longest_ = 0;
};

}  // namespace accelerate::models
