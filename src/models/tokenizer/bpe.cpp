#include "models/tokenizer/bpe.hpp"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <queue>
#include <tuple>

namespace accelerate::models {
namespace {

constexpr uint64_t kEmpty = std::numeric_limits<uint64_t>::max();

uint64_t key_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

uint64_t spread(uint64_t key) {
  key *= 0x9E3779B97F4A7C15ULL;
  return key ^ key >> 32;
}

}  // namespace

Bpe::Bpe(const std::vector<std::string>& bytes, const std::vector<Merge>& merges, const BpeOptions& options)
    : unk_(options.unk), fuse_unk_(options.fuse_unk) {
  id_of_byte_.fill(-1);
  for (size_t id = 0; id < bytes.size(); ++id) {
    if (bytes[id].size() == 1) id_of_byte_[static_cast<unsigned char>(bytes[id][0])] = static_cast<int32_t>(id);
    if (options.whole_words && !bytes[id].empty()) words_.emplace(bytes[id], static_cast<int32_t>(id));
  }
  const auto size = std::bit_ceil(merges.size() * 2 + 2);
  keys_.assign(size, kEmpty);
  values_.resize(size);
  mask_ = size - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto key = key_of(merges[rank].left, merges[rank].right);
    auto slot = spread(key) & mask_;
    while (keys_[slot] != kEmpty && keys_[slot] != key) slot = (slot + 1) & mask_;
    keys_[slot] = key;  // of two equal pairs the later counts, as in a map
    values_[slot] = {static_cast<int32_t>(rank), merges[rank].result};
  }
}

const Bpe::Found* Bpe::find(int32_t left, int32_t right) const {
  const auto key = key_of(left, right);
  for (auto slot = spread(key) & mask_; keys_[slot] != kEmpty; slot = (slot + 1) & mask_)
    if (keys_[slot] == key) return &values_[slot];
  return nullptr;
}

void Bpe::append(std::string_view piece, Cache& cache, std::vector<int64_t>& out) const {
  if (!words_.empty())
    if (const auto word = words_.find(std::string(piece)); word != words_.end()) return out.push_back(word->second);
  const auto begin = out.size();
  const auto [found, fresh] = cache.try_emplace(piece, begin, 0);
  if (!fresh) {
    const auto [from, count] = found->second;
    for (size_t i = 0; i < count; ++i) out.push_back(out[from + i]);
    return;
  }
  merge(piece, out);
  found->second.second = out.size() - begin;
}

void Bpe::merge(std::string_view piece, std::vector<int64_t>& out) const {
  // Symbols are a list linked by index; the best pair is found by looking at all of them while they are few, and
  // through a heap when they are many.
  struct Symbol {
    int32_t id, before, after;
  };
  thread_local std::vector<Symbol> symbols;
  symbols.clear();
  bool after_unk = false;
  for (const char byte : piece) {
    const auto known = id_of_byte_[static_cast<unsigned char>(byte)], id = known >= 0 ? known : unk_;
    const auto place = static_cast<int32_t>(symbols.size());
    const bool fuses = known < 0 && after_unk && fuse_unk_;
    if (id >= 0 && !fuses) symbols.push_back({id, place - 1, place + 1});
    after_unk = known < 0;
  }
  if (symbols.empty()) return;
  symbols.back().after = -1;
  const auto join = [&](int32_t left, int32_t result) {
    auto& symbol = symbols[static_cast<size_t>(left)];
    auto& gone = symbols[static_cast<size_t>(symbol.after)];
    symbol.id = result;
    gone.id = -1;
    symbol.after = gone.after;
    if (symbol.after >= 0) symbols[static_cast<size_t>(symbol.after)].before = left;
  };
  const auto pair_at = [&](int32_t left) -> const Found* {
    const auto& symbol = symbols[static_cast<size_t>(left)];
    return symbol.id < 0 || symbol.after < 0 ? nullptr : find(symbol.id, symbols[static_cast<size_t>(symbol.after)].id);
  };
  constexpr size_t kFew = 24;
  if (symbols.size() <= kFew) {
    thread_local std::vector<Found> pairs;  // of each symbol with the next one
    constexpr Found kNone{std::numeric_limits<int32_t>::max(), -1};
    pairs.assign(symbols.size(), kNone);
    const auto update = [&](int32_t left) {
      const auto* found = pair_at(left);
      pairs[static_cast<size_t>(left)] = found ? *found : kNone;
    };
    for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); ++i) update(i);
    while (true) {
      const auto best =
          std::min_element(pairs.begin(), pairs.end(), [](const Found& a, const Found& b) { return a.rank < b.rank; });
      if (best->result < 0) break;
      const auto left = static_cast<int32_t>(best - pairs.begin());
      pairs[static_cast<size_t>(symbols[static_cast<size_t>(left)].after)] = kNone;
      join(left, best->result);
      update(left);
      if (const auto before = symbols[static_cast<size_t>(left)].before; before >= 0) update(before);
    }
  } else {
    using Candidate = std::tuple<int32_t, int32_t, int32_t>;  // rank, place, result: of equal ranks the leftmost
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> queue;
    const auto offer = [&](int32_t left) {
      if (const auto* found = pair_at(left)) queue.emplace(found->rank, left, found->result);
    };
    for (int32_t i = 0; i < static_cast<int32_t>(symbols.size()); ++i) offer(i);
    while (!queue.empty()) {
      const auto [rank, left, result] = queue.top();
      queue.pop();
      const auto* now = pair_at(left);
      if (!now || now->rank != rank) continue;  // a neighbour was merged since
      join(left, result);
      offer(left);
      if (const auto before = symbols[static_cast<size_t>(left)].before; before >= 0) offer(before);
    }
  }
  for (int32_t i = 0; i >= 0; i = symbols[static_cast<size_t>(i)].after)
    out.push_back(symbols[static_cast<size_t>(i)].id);
}

}  // namespace accelerate::models
