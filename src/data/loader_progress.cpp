#include "loader_progress.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <utility>

#include "accelerate/data/random.hpp"
#include "accelerate/state.hpp"

namespace accelerate::data::detail {
namespace {

at::Tensor generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void restore_generator(at::Generator generator, const at::Tensor& state) {
  if (!state.defined() || state.numel() == 0) return;
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor no_state() { return at::empty({0}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

LoaderProgress::LoaderProgress(const LoaderCore& core, PreparedSettings settings,
                               const std::shared_ptr<AnyBatchSampler>& batches, int64_t skip)
    : settings_(std::move(settings)),
      batch_size_(core.options().batch_size),
      num_samples_(core.dataset_size()),
      drop_last_(core.options().drop_last),
      is_stream_(core.is_stream()),
      skip_(skip) {
  if (batches) {
    generator_ = batches->generator();
    batch_size_ = batches->batch_size();
    if (const auto samples = batches->num_samples()) num_samples_ = samples;
    drop_last_ = batches->drop_last();
  }
  if (!generator_) std::erase(settings_.rng_types, RNGType::generator);
}

std::optional<int64_t> LoaderProgress::total_batch_size() const {
  if (!batch_size_) return std::nullopt;
  return settings_.config.split_batches ? *batch_size_ : *batch_size_ * settings_.num_processes;
}

bool LoaderProgress::override_even_batches(std::optional<bool> even) {
  if (is_stream_ || settings_.dispatch) return false;
  even_override_ = even;
  return true;
}

DataLoaderState LoaderProgress::state_dict() const {
  if (loaded_) return *loaded_;
  const bool between_passes = yielded_ == 0 || end_;
  if (!between_passes) return {iteration_, yielded_, sampler_rng_state_, default_rng_state_};
  // The numbers of the pass that just ended are drawn already, so the generator is ready for the next one.
  return {end_ && yielded_ > 0 ? iteration_ + 1 : iteration_, 0, generator_ ? generator_state(*generator_) : no_state(),
          no_state()};
}

void LoaderProgress::load_state_dict(const DataLoaderState& state) {
  loaded_ = state;
  iteration_ = state.iteration;
}

void LoaderProgress::begin_pass(const std::function<void(int64_t)>& start) {
  const auto resumed = std::exchange(loaded_, std::nullopt);
  at::Generator default_generator = at::detail::getDefaultCPUGenerator();
  if (resumed && generator_) restore_generator(*generator_, resumed->sampler_rng_state);
  const bool midway = resumed && resumed->batches_yielded > 0;
  if (!midway) synchronize_rng_states(settings_.rng_types, generator_);
  sampler_rng_state_ = generator_ ? generator_state(*generator_) : no_state();
  const at::Tensor before = generator_state(default_generator);
  if (midway) restore_generator(default_generator, resumed->default_rng_state);
  default_rng_state_ = generator_state(default_generator);

  end_ = false;
  remainder_ = -1;
  if (!settings_.dispatch && !is_stream_ && !drop_last_ && num_samples_ && total_batch_size())
    remainder_ = *num_samples_ % *total_batch_size();
  yielded_ = midway ? resumed->batches_yielded : skip_;
  start(yielded_);
  // The order was drawn as in the interrupted pass; everything else goes on from where the program is.
  if (midway) restore_generator(default_generator, before);
  GradientState().add_dataloader(this);
}

void LoaderProgress::end_pass(bool completed) noexcept {
  if (completed) {
    ++iteration_;
    yielded_ = 0;
  }
  try {
    GradientState().remove_dataloader(this);
  } catch (...) {  // the process is going down
  }
}

void LoaderProgress::count_batch(bool last, const std::optional<int64_t>& remainder) {
  ++yielded_;
  if (!last) return;
  end_ = true;
  if (remainder) remainder_ = *remainder;
}

}  // namespace accelerate::data::detail
