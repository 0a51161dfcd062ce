#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace accelerate::models {

struct BpeOptions {
  bool whole_words = false;  ///< a piece that is a token is that token, without merging
  int32_t unk = -1;          ///< of bytes that are no token; -1: they are left out
  bool fuse_unk = false;     ///< several in a row are one
};

/// Byte pair encoding of pieces of text.
class Bpe {
 public:
  struct Merge {
    int32_t left, right, result;
  };
  /// @param bytes   Of every token that merging can yield, by id; others are empty.
  /// @param merges  The first is made first.
  Bpe(const std::vector<std::string>& bytes, const std::vector<Merge>& merges, const BpeOptions& options);

  /// Remembers the pieces of a text, most of which occur again.
  /// Piece -> where its ids lie in the output.
  using Cache = std::unordered_map<std::string_view, std::pair<size_t, size_t>>;

  /// Appends the ids of a piece; @param cache  of this text, whose bytes stay
  /// where they are, and this output
  void append(std::string_view piece, Cache& cache, std::vector<int64_t>& out) const;

 private:
  struct Found {
    int32_t rank, result;
  };
  const Found* find(int32_t left, int32_t right) const;
  void merge(std::string_view piece, std::vector<int64_t>& out) const;

  std::array<int32_t, 256> id_of_byte_;
  int32_t unk_;
  bool fuse_unk_;
  std::unordered_map<std::string, int32_t> words_;  ///< only where whole words count
  // Pairs in a table with open addressing: it is looked into for every two neighbours.
  std::vector<uint64_t> keys_;
  std::vector<Found> values_;
  uint64_t mask_ = 0;
};

}  // namespace accelerate::models
