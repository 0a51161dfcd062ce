#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "accelerate/data/prepared_status.hpp"
#include "prepared_settings.hpp"

namespace accelerate::data::detail {

/// The position of a prepared loader: passes, batches, the end, and the generators at the start of the pass.
/// PreparedLoader decides what is read.
class LoaderProgress : public PreparedStatus {
 public:
  LoaderProgress(const LoaderCore& core, PreparedSettings settings, const std::shared_ptr<AnyBatchSampler>& batches,
                 int64_t skip);

  bool end_of_dataloader() const override { return end_; }
  int64_t remainder() const override { return remainder_; }
  int64_t own_rows() const override { return std::max<int64_t>(end_ ? remainder_ : own_rows_, 0); }
  int64_t iteration() const override { return iteration_; }
  void set_iteration(int64_t iteration) override { iteration_ = iteration; }
  std::optional<int64_t> total_batch_size() const override;
  std::optional<int64_t> total_dataset_length() const override { return num_samples_; }
  bool even_batches() const override { return even_override_.value_or(settings_.config.even_batches); }
  bool override_even_batches(std::optional<bool> even) override;
  bool is_stream() const override { return is_stream_; }
  bool dispatches() const override { return settings_.dispatch; }
  int64_t skip() const override { return skip_; }
  DataLoaderState state_dict() const override;
  void load_state_dict(const DataLoaderState& state) override;

 protected:
  /// Synchronises generators, resets the flags and announces the loader to GradientState. Collective.
  /// `start` begins reading after so many samples and then so many steps; it runs with the generators as they were at
  /// the start of the pass.
  void begin_pass(const std::function<void(int64_t samples, int64_t steps)>& start);
  void end_pass(bool completed) noexcept;
  void count_batch(bool last, const std::optional<int64_t>& remainder);

  /// No pass is under way, or was left in its middle.
  bool between_passes() const { return loaded_ || end_ || (yielded_ == 0 && samples_before_ == 0); }
  const PreparedSettings& settings() const { return settings_; }
  /// Null for streams.
  const std::shared_ptr<AnyBatchSampler>& batches() const { return batches_; }
  bool drop_last() const { return drop_last_; }

 private:
  /// The same position as `state`, for this number of ranks and this batch size.
  DataLoaderState fitted(const DataLoaderState& state) const;

  PreparedSettings settings_;
  std::shared_ptr<AnyBatchSampler> batches_;
  std::optional<bool> even_override_;
  std::optional<at::Generator> generator_;
  std::optional<int64_t> batch_size_, num_samples_;
  bool drop_last_, is_stream_, can_shard_;
  int64_t skip_;
  int64_t iteration_ = 0;
  int64_t yielded_ = 0, samples_before_ = 0;  // of the pass: batches, and the samples before the first of them
  bool end_ = false;
  int64_t remainder_ = -1;
  int64_t own_rows_ = 0;                              // of a batch that is not the last; 0: all
  at::Tensor sampler_rng_state_, default_rng_state_;  // at the start of the pass
  std::optional<DataLoaderState> loaded_;
};

}  // namespace accelerate::data::detail
