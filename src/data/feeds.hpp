#pragma once

/// Feeds in which ranks talk to each other for every batch. Collective: all ranks call next() in step.

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelerate/data/batch_ops.hpp"
#include "pass.hpp"
#include "prepared_settings.hpp"

namespace accelerate::data::detail {

/// Rank 0 reads, cuts nothing, and sends all ranks the whole batch with the rows of each; every rank keeps its own.
/// Collective.
class DispatchFeed final : public Feed {
 public:
  struct Plan {
    bool drop_last = false;
    /// Batches have the sizes that the sampler gives them.
    bool sizes_vary = false;
    /// Empty: rows as they follow each other.
    SliceFunction<AnyBatch> slice = {};
    /// For a pass that does not start at its beginning: the rows that complete its last batch. Empty: the first ones
    /// that are read.
    std::function<AnyBatch()> first_rows = {};
  };

  /// @param pass  null on all ranks but rank 0
  DispatchFeed(const BatchOps& ops, std::unique_ptr<Pass> pass, const PreparedSettings& settings, Plan plan);
  std::optional<LoadedBatch> next() override;

 private:
  struct Header;
  struct Group {
    AnyBatch batch;
    std::vector<int64_t> each_rows;
  };
  /// On rank 0.
  Header next_batch(AnyBatch& batch);
  std::optional<Group> read_group();
  Header share(Group group, bool last, AnyBatch& batch);

  const BatchOps& ops_;
  std::unique_ptr<Pass> pass_;
  int64_t ranks_, rank_;
  bool split_;
  Plan plan_;
  bool begun_ = false, ended_ = false;
  std::optional<Group> ahead_;
  std::exception_ptr failed_;
  AnyBatch first_;
};

/// Streams that shard themselves may end at different steps on different ranks. Ranks tell each other how many samples
/// they have; when one runs short, the samples of that step are shared out again, so that all ranks do the same number
/// of steps. Collective.
class AgreedFeed final : public Feed {
 public:
  AgreedFeed(const BatchOps& ops, std::unique_ptr<Pass> pass, const PreparedSettings& settings, int64_t batch_size,
             bool drop_last);
  std::optional<LoadedBatch> next() override;

 private:
  /// The samples that all ranks have left, in equal parts.
  LoadedBatch shared_out(const AnyBatch& mine, int64_t samples) const;

  const BatchOps& ops_;
  std::unique_ptr<Pass> pass_;
  int64_t ranks_, rank_, batch_size_;
  bool drop_last_;
  bool ended_ = false;
};

[[noreturn]] void throw_reader_failed(int64_t rank, const std::string& what);
std::string what_of(const std::exception_ptr& error);

}  // namespace accelerate::data::detail
