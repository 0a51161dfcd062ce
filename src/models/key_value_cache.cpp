#include "accelerate/models/key_value_cache.hpp"
#include "memory/huge_pages.hpp"
#include "utils/raise.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace accelerate::models {
namespace {

constexpr int64_t kFirstCapacity = 64;  // tokens

/// A buffer of the same kind with room for `capacity` tokens that begins with the first `length` tokens of `old`.
at::Tensor grown(const at::Tensor& old, const at::Tensor& like, int64_t length, int64_t capacity) {
  const std::vector<int64_t> sizes{like.size(0), like.size(1), capacity, like.size(3)};
  // Not among the activations of a long prompt: as it stays when these go, no two of their places would become one.
  at::Tensor buffer = like.is_cpu() ? empty_in_huge_pages(sizes, like.scalar_type()) : at::empty(sizes, like.options());
  if (length) buffer.narrow(2, 0, length).copy_(old.narrow(2, 0, length));
  return buffer;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> KeyValueCache::update(int64_t layer, const at::Tensor& key, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  if (listener_) listener_(layer);
  if (layer >= static_cast<int64_t>(layers_.size())) layers_.resize(layer + 1);
  auto& own = layers_[layer];
  const int64_t end = own.length + key.size(2);
  if (own.length &&
      (key.size(0) != own.keys.size(0) || key.size(1) != own.keys.size(1) || key.size(3) != own.keys.size(3)))
    raise<ShapeError>(
        "KeyValueCache::update: layer {} got keys of shape {} [B, H, T, d], but holds {}. Is the cache of another "
        "batch or model? clear() it first. A pipeline (prepare_pippy) takes a cache with num_chunks = 1.",
        layer, key.sizes(), own.keys.narrow(2, 0, own.length).sizes());
  if (!own.keys.defined() || end > own.keys.size(2) || !own.length) {
    const int64_t capacity = std::max({end, 2 * own.length, kFirstCapacity});
    own.keys = grown(own.keys, key, own.length, capacity);
    own.values = grown(own.values, value, own.length, capacity);
  }
  own.keys.narrow(2, own.length, key.size(2)).copy_(key);
  own.values.narrow(2, own.length, key.size(2)).copy_(value);
  own.length = end;
  return {own.keys.narrow(2, 0, end), own.values.narrow(2, 0, end)};
}

std::optional<KeyValueCache::Rows> KeyValueCache::append_row(int64_t layer, int64_t heads, int64_t size) {
  if (layer >= static_cast<int64_t>(layers_.size())) return std::nullopt;
  auto& own = layers_[layer];
  const auto fits = [&](const at::Tensor& buffer) {
    return buffer.is_cpu() && buffer.scalar_type() == at::kFloat && buffer.is_contiguous() && buffer.size(0) == 1 &&
           buffer.size(1) == heads && buffer.size(3) == size;
  };
  if (!own.length || !fits(own.keys) || !fits(own.values)) return std::nullopt;
  if (listener_) listener_(layer);
  if (own.length == own.keys.size(2)) {
    own.keys = grown(own.keys, own.keys, own.length, 2 * own.length);
    own.values = grown(own.values, own.values, own.length, 2 * own.length);
  }
  ++own.length;
  return Rows{own.keys.mutable_data_ptr<float>(), own.values.mutable_data_ptr<float>(), own.keys.size(2), own.length};
}

int64_t KeyValueCache::length() const {
  if (layers_.empty()) return 0;
  return std::min_element(layers_.begin(), layers_.end(),
                          [](const Layer& a, const Layer& b) { return a.length < b.length; })
      ->length;
}

void KeyValueCache::reorder(const at::Tensor& rows) {
  const c10::NoGradGuard no_grad;
  for (auto& layer : layers_) {
    if (!layer.length) continue;
    // Only what is filled is copied, into a buffer of the same capacity.
    for (auto* buffer : {&layer.keys, &layer.values}) {
      const auto chosen = at::index_select(buffer->narrow(2, 0, layer.length), 0, rows.to(buffer->device()));
      *buffer = grown(chosen, chosen, layer.length, buffer->size(2));
    }
  }
}

void KeyValueCache::truncate(int64_t tokens) {
  if (tokens < 0 || tokens > length())
    raise<ShapeError>("KeyValueCache::truncate: {} tokens, expected 0 to {}, which the cache holds.", tokens, length());
  for (auto& layer : layers_) layer.length = tokens;
}

}  // namespace accelerate::models
