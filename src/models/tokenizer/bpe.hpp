#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace accelerate::models {

/// Byte pair encoding of pieces of text.
class Bpe {
 public:
  struct Merge {
    int32_t left, right, result;
  };
  /// @param bytes   Of every token that merging can yield, by id; others are empty.
  /// @param merges  The first is made first.
  /// @param whole_words  A piece that is a token is that token, without merging.
  Bpe(const std::vector<std::string>& bytes, const std::vector<Merge>& merges, bool whole_words);

  /// Remembers the pieces of a text, most of which occur again.
  using Cache =
      std::unordered_map<std::string_view, std::pair<size_t, size_t>>;  ///< piece -> where its ids lie in the output

  /// Appends the ids of a piece; bytes that are no token are left out. @param cache  of this text, whose bytes stay
  /// where they are, and this output
  void append(std::string_view piece, Cache& cache, std::vector<int64_t>& out) const;

 private:
  struct Found {
    int32_t rank, result;
  };
  const Found* find(int32_t left, int32_t right) const;
  void merge(std::string_view piece, std::vector<int64_t>& out) const;

  std::array<int32_t, 256> id_of_byte_;
  std::unordered_map<std::string, int32_t> words_;  ///< only where whole words count
  // Pairs in a table with open addressing: it is looked into for every two neighbours.
  std::vector<uint64_t> keys_;
  std::vector<Found> values_;
  uint64_t mask_ = 0;
};

}  // namespace accelerate::models
