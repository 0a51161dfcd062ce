#pragma once

/// Data sets of the loader tests: samples are the numbers 0, 1, 2, ...

#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

namespace datasets {

inline std::vector<int64_t> values(const torch::Tensor& t) {
  const auto longs = t.to(torch::kLong).contiguous();
  return {longs.data_ptr<int64_t>(), longs.data_ptr<int64_t>() + longs.numel()};
}
/// All batches of a pass.
template <class Loader> std::vector<std::vector<int64_t>> batches_of(Loader& loader) {
  std::vector<std::vector<int64_t>> all;
  for (auto& batch : loader) all.push_back(values(batch));
  return all;
}

using Batches = std::vector<std::vector<int64_t>>;

inline std::vector<torch::Tensor> numbers(int64_t n) {
  std::vector<torch::Tensor> samples;
  for (int64_t i = 0; i < n; ++i) samples.push_back(torch::tensor(i));
  return samples;
}

/// Throws at one index, and counts reads.
struct Faulty {
  int64_t n = 0, bad = -1;
  std::chrono::milliseconds delay{0};
  std::shared_ptr<std::atomic<int64_t>> reads = std::make_shared<std::atomic<int64_t>>(0);
  int64_t size() const { return n; }
  torch::Tensor get(size_t index) const {
    ++*reads;
    if (delay.count() > 0) std::this_thread::sleep_for(delay);
    if (static_cast<int64_t>(index) == bad) throw std::out_of_range("no sample " + std::to_string(index));
    return torch::tensor(static_cast<int64_t>(index));
  }
};

/// The numbers below n, as a stream.
struct Stream {
  int64_t n = 0;
  int64_t at = 0;
  std::shared_ptr<std::atomic<int64_t>> reads = std::make_shared<std::atomic<int64_t>>(0);
  std::optional<torch::Tensor> next() {
    if (at >= n) return std::nullopt;
    ++*reads;
    return torch::tensor(at++);
  }
  void reset() { at = 0; }
};

struct SizedStream : Stream {
  explicit SizedStream(int64_t n) { this->n = n; }
  int64_t size() const { return n; }
};

/// Reads every world_size-th number once it is told its rank.
struct SelfSharding : Stream {
  explicit SelfSharding(int64_t n) { this->n = n; }
  int64_t step = 1, first = 0;
  void shard(int64_t rank, int64_t world_size) {
    first = rank;
    step = world_size;
  }
  void reset() { at = first; }
  std::optional<torch::Tensor> next() {
    if (at >= n) return std::nullopt;
    ++*reads;
    const auto sample = torch::tensor(at);
    at += step;
    return sample;
  }
};

/// As LibTorch's own MNIST: images and labels.
struct Images : torch::data::Dataset<Images> {
  explicit Images(int64_t n) : n(n) {}
  torch::data::Example<> get(size_t index) override {
    return {torch::full({1, 2, 2}, static_cast<float>(index)), torch::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(n); }
  int64_t n;
};

/// A LibTorch stream: sized and without an end of its own.
struct TorchStream : torch::data::datasets::StreamDataset<TorchStream> {
  explicit TorchStream(int64_t n) : n(n) {}
  std::vector<torch::data::Example<>> get_batch(size_t count) override {
    std::vector<torch::data::Example<>> batch;
    for (size_t i = 0; i < count; ++i, ++at) batch.emplace_back(torch::tensor(at % n), torch::tensor(at % n));
    return batch;
  }
  std::optional<size_t> size() const override { return static_cast<size_t>(n); }
  int64_t n, at = 0;
};

/// A LibTorch stateful data set: ends by itself and can start again.
struct TorchStateful : torch::data::datasets::StatefulDataset<TorchStateful, std::vector<torch::data::Example<>>> {
  explicit TorchStateful(int64_t n) : n(n) {}
  std::optional<std::vector<torch::data::Example<>>> get_batch(size_t count) override {
    std::vector<torch::data::Example<>> batch;
    for (size_t i = 0; i < count && at < n; ++i, ++at) batch.emplace_back(torch::tensor(at), torch::tensor(at));
    if (batch.empty()) return std::nullopt;
    return batch;
  }
  std::optional<size_t> size() const override { return std::nullopt; }
  void reset() override { at = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
  int64_t n, at = 0;
};

/// Batches of 1, 2, 3, ... samples.
struct Growing {
  int64_t n = 0;
  int64_t at = 0, length = 0;
  void reset() { at = length = 0; }
  std::optional<std::vector<size_t>> next() {
    if (at >= n) return std::nullopt;
    ++length;
    std::vector<size_t> batch;
    for (int64_t i = 0; i < length && at < n; ++i) batch.push_back(static_cast<size_t>(at++));
    return batch;
  }
};

}  // namespace datasets
