// Batches whose type is erased: what the engines of the loaders can do with them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerate/data/batch_ops.hpp"
#include "accelerate/utils/error.hpp"
#include "data_datasets.hpp"

namespace {

using accelerate::data::detail::any_batch;
using accelerate::data::detail::AnyBatch;
using accelerate::data::detail::batch_as;
using accelerate::data::detail::batch_ops;
using accelerate::data::detail::BatchOps;
using datasets::values;

struct Texts {
  torch::Tensor ids, scale;  // scale has no rows
  std::vector<std::string> words;
  std::map<std::string, std::vector<int64_t>> notes;
  std::optional<torch::Tensor> mask;
  std::string title;  // not of the batch's rows
  ACCELERATE_FIELDS(ids, scale, words, notes, mask)
};

Texts texts(int64_t begin, int64_t end) {
  Texts batch{.ids = torch::arange(begin, end), .scale = torch::tensor(0.5), .title = "t"};
  for (int64_t i = begin; i < end; ++i) {
    batch.words.push_back("w" + std::to_string(i));
    batch.notes["twice"].push_back(2 * i);
  }
  batch.notes["three"] = {7, 8, 9};  // as long as some batches by chance only
  batch.mask = torch::arange(begin, end) % 2 == 0;
  return batch;
}

struct Closed {  // can't be written to bytes
  struct Secret {
    int number = 0;
  };
  torch::Tensor rows;
  Secret secret;
  ACCELERATE_FIELDS(rows, secret)
};

const BatchOps& kOps = batch_ops<Texts>;

void expect_rows(const AnyBatch& batch, int64_t begin, int64_t end) {
  const Texts &found = batch_as<Texts>(batch), expected = texts(begin, end);
  EXPECT_EQ(kOps.rows(batch), end - begin);
  EXPECT_EQ(values(found.ids), values(expected.ids));
  EXPECT_EQ(found.words, expected.words);
  EXPECT_EQ(found.notes.at("twice"), expected.notes.at("twice"));
  EXPECT_EQ(found.notes.at("three"), expected.notes.at("three"));
  EXPECT_TRUE(torch::equal(*found.mask, *expected.mask));
  EXPECT_EQ(found.scale.item<double>(), 0.5);
}

TEST(AnyBatch, MovesWithoutTouchingTheBatch) {
  AnyBatch batch = any_batch(texts(0, 5));
  const Texts* there = &batch_as<Texts>(batch);
  const AnyBatch moved = std::move(batch);
  EXPECT_FALSE(batch);
  EXPECT_EQ(&batch_as<Texts>(moved), there);
  EXPECT_EQ(batch_as<Texts>(moved).title, "t");
}

TEST(AnyBatch, IsDestroyedAsItsOwnType) {
  const auto alive = std::make_shared<int>(1);
  { const AnyBatch batch = any_batch(std::vector<std::shared_ptr<int>>{alive, alive}); }
  EXPECT_EQ(alive.use_count(), 1);
}

TEST(BatchOps, RowsAreCutJoinedAndRepeated) {
  const AnyBatch whole = any_batch(texts(0, 6));
  const AnyBatch head = kOps.slice(whole, 0, 4, 6), tail = kOps.slice(whole, 4, 6, 6);
  expect_rows(head, 0, 4);
  expect_rows(tail, 4, 6);
  EXPECT_TRUE(batch_as<Texts>(tail).ids.is_alias_of(batch_as<Texts>(whole).ids)) << "rows are views";
  std::vector<AnyBatch> both;
  both.push_back(kOps.slice(whole, 0, 4, 6));
  both.push_back(kOps.slice(whole, 4, 6, 6));
  expect_rows(kOps.concat(both), 0, 6);
  expect_rows(whole, 0, 6);
  const AnyBatch full = kOps.complete(tail, head, 11);
  EXPECT_EQ(values(batch_as<Texts>(full).ids), (std::vector<int64_t>{4, 5, 0, 1, 2, 3, 0, 1, 2, 3, 0}));
  EXPECT_EQ(batch_as<Texts>(full).words.back(), "w0");
  EXPECT_EQ(values(batch_as<Texts>(kOps.complete(tail, tail, 5)).ids), (std::vector<int64_t>{4, 5, 4, 5, 4}));
  expect_rows(kOps.complete(head, tail, 3), 0, 4);
  both.push_back(any_batch(texts(6, 8)));
  batch_as<Texts>(both.back()).mask.reset();
  EXPECT_THROW(kOps.concat(both), accelerate::ShapeError);
}

TEST(BatchOps, WhatIsOnTheDeviceAlreadyStaysWhereItIs) {
  AnyBatch batch = any_batch(texts(0, 3));
  const Texts& seen = batch_as<Texts>(batch);
  const auto* data = seen.ids.data_ptr();
  kOps.to_device(batch, torch::kCPU, false);
  EXPECT_EQ(seen.ids.data_ptr(), data);
  EXPECT_EQ(seen.title, "t");
  kOps.to_device(batch, torch::kMeta, false);
  EXPECT_TRUE(seen.ids.is_meta() && seen.mask->is_meta() && seen.scale.is_meta());
  EXPECT_EQ(seen.words[2], "w2");
}

TEST(BatchOps, BatchesTravelAsBytesIfTheirTypeCan) {
  accelerate::ArchiveWriter writer;
  kOps.write(any_batch(texts(2, 5)), writer);
  const std::string bytes = writer.take();
  accelerate::ArchiveReader reader(bytes);
  expect_rows(kOps.read(reader), 2, 5);
  EXPECT_TRUE(kOps.archivable());

  const BatchOps& closed = batch_ops<Closed>;
  EXPECT_FALSE(closed.archivable());
  EXPECT_THROW(closed.write(any_batch(Closed{torch::ones(2), {}}), writer), accelerate::ConfigError);
  EXPECT_EQ(closed.rows(closed.slice(any_batch(Closed{torch::ones(4), {}}), 1, 3, 4)), 2);
  static_assert(accelerate::archivable<std::map<std::string, std::vector<bool>>>);
  static_assert(!accelerate::archivable<std::map<const void*, torch::Tensor>>, "its keys can't be written");
}

}  // namespace
