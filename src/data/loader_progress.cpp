#include "loader_progress.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <mutex>
#include <utility>

#include "accelerate/data/random.hpp"
#include "accelerate/state.hpp"
#include "data/counts.hpp"
#include "draws.hpp"
#include "utils/raise.hpp"

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
      batches_(batches),
      batch_size_(core.options().batch_size),
      num_samples_(core.dataset_size()),
      drop_last_(core.options().drop_last),
      is_stream_(core.is_stream()),
      can_shard_(core.can_shard()),
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
  if (!between_passes())
    return {iteration_,
            yielded_,
            sampler_rng_state_,
            default_rng_state_,
            samples_before_,
            total_batch_size().value_or(0),
            settings_.num_processes};
  // The numbers of the pass that just ended are drawn already, so the generator is ready for the next one.
  return {.iteration = end_ && yielded_ > 0 ? iteration_ + 1 : iteration_,
          .sampler_rng_state = generator_ ? generator_state(*generator_) : no_state(),
          .default_rng_state = no_state(),
          .total_batch_size = total_batch_size().value_or(0),
          .num_processes = settings_.num_processes};
}

DataLoaderState LoaderProgress::fitted(const DataLoaderState& state) const {
  const int64_t ranks = settings_.num_processes, total = total_batch_size().value_or(0);
  const bool between_passes = state.batches_yielded == 0 && state.samples_before == 0;
  if (state.num_processes == 0 || (state.num_processes == ranks && state.total_batch_size == total)) return state;
  DataLoaderState here = state;
  here.num_processes = ranks;
  here.total_batch_size = total;
  if (between_passes) return here;
  const auto refuse = [&](const char* why) {
    raise<CheckpointError>(
        "DataLoader: the state was saved by {} ranks after {} steps of {} samples in pass {}, and is loaded by {} "
        "ranks with steps of {}: {}. Load it with the ranks and the batch size that it was saved with, or save between "
        "passes",
        state.num_processes, state.batches_yielded, state.total_batch_size, state.iteration, ranks, total, why);
  };
  if (can_shard_ && !settings_.dispatch && (ranks > 1 || state.num_processes > 1))
    refuse("the data set decides which rank reads what, so nobody knows which samples are left");
  if (total == 0 || state.total_batch_size == 0) {
    // Whole batches, which ranks get in turn.
    const int64_t batches = state.batches_yielded * state.num_processes;
    if (total != state.total_batch_size || batches % ranks != 0)
      refuse("batches vary in size, and those that are done can't be counted in steps of this run");
    here.batches_yielded = batches / ranks;
    return here;
  }
  const int64_t samples = state.samples_before + state.batches_yielded * state.total_batch_size;
  if (samples % total == 0) {
    here.samples_before = 0;
    here.batches_yielded = samples / total;
    return here;
  }
  if (batches_ && !std::dynamic_pointer_cast<BatchSampler>(batches_))
    refuse("the sampler makes the batches, and those that are done are no whole number of steps of this run");
  here.samples_before = samples;
  here.batches_yielded = 0;
  return here;
}

void LoaderProgress::load_state_dict(const DataLoaderState& state) {
  loaded_ = fitted(state);
  iteration_ = state.iteration;
}

void LoaderProgress::begin_pass(const std::function<void(int64_t, int64_t)>& start) {
  const auto resumed = std::exchange(loaded_, std::nullopt);
  const at::Generator& default_generator = at::detail::getDefaultCPUGenerator();
  const bool midway = resumed && (resumed->batches_yielded > 0 || resumed->samples_before > 0);
  const bool had_generator = resumed && resumed->sampler_rng_state.defined() && resumed->sampler_rng_state.numel() > 0;
  // A rank alone has no generator for its sampler, several have one: the pass is drawn as it was begun.
  if (had_generator && !generator_ && batches_) batches_->set_generator(generator_.emplace(seeded_generator(0)));
  const bool without_generator = midway && !had_generator && generator_ && batches_;
  if (resumed && generator_) restore_generator(*generator_, resumed->sampler_rng_state);
  if (!midway) synchronize_rng_states(settings_.rng_types, generator_);
  sampler_rng_state_ = generator_ && !without_generator ? generator_state(*generator_) : no_state();
  const at::Tensor before = generator_state(default_generator);
  if (midway) restore_generator(default_generator, resumed->default_rng_state);
  default_rng_state_ = generator_state(default_generator);

  end_ = false;
  remainder_ = -1;
  own_rows_ = 0;
  yielded_ = midway ? resumed->batches_yielded : skip_;
  samples_before_ = midway ? resumed->samples_before : 0;
  if (!settings_.dispatch && !is_stream_ && !drop_last_ && num_samples_ && total_batch_size())
    remainder_ = (*num_samples_ - samples_before_) % *total_batch_size();
  if (without_generator) batches_->set_generator(at::Generator());
  start(samples_before_, yielded_);
  if (without_generator) batches_->set_generator(*generator_);
  // The order was drawn as in the interrupted pass; everything else goes on from where the program is.
  if (midway) restore_generator(default_generator, before);
  GradientState().add_dataloader(this);
}

void LoaderProgress::end_pass(bool completed) noexcept {
  if (completed) {
    ++iteration_;
    yielded_ = samples_before_ = 0;
  }
  try {
    GradientState().remove_dataloader(this);
  } catch (...) {  // the process is going down
  }
}

void LoaderProgress::count_batch(bool last, const std::optional<int64_t>& remainder) {
  ++yielded_;
  own_rows_ = settings_.dispatch ? 0 : remainder.value_or(0);
  if (!last) return;
  end_ = true;
  if (remainder) remainder_ = *remainder;
  if (settings_.num_processes == 1 || settings_.dispatch || is_stream_ || remainder_ <= 0) return;
  if (!even_batches()) counts::add(DataCount::uneven_passes);
  else if (const auto total = total_batch_size()) counts::add(DataCount::samples_repeated, *total - remainder_);
}

}  // namespace accelerate::data::detail
