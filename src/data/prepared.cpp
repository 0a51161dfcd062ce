#include "accelerate/data/prepared.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include "draws.hpp"

namespace accelerate::data {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void restore(at::Generator generator, const at::Tensor& state) {
  if (!state.defined() || state.numel() == 0) return;
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor nothing() { return at::empty({0}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

c10::IValue DataLoaderState::to_ivalue() const {
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("iteration", iteration);
  dict.insert("batches_yielded", batches_yielded);
  dict.insert("sampler_rng_state", sampler_rng_state.defined() ? sampler_rng_state : nothing());
  dict.insert("default_rng_state", default_rng_state.defined() ? default_rng_state : nothing());
  return dict;
}

DataLoaderState DataLoaderState::from_ivalue(const c10::IValue& value) {
  const auto fail = [](const std::string& found) {
    throw CheckpointError("DataLoaderState: found " + found +
                          ", expected a dictionary with iteration, batches_yielded, sampler_rng_state and "
                          "default_rng_state; the file is not a loader's state or comes from another version");
  };
  if (!value.isGenericDict()) fail("a " + value.tagKind());
  const auto dict = value.toGenericDict();
  const auto field = [&](const char* name) {
    const auto found = dict.find(name);
    if (found == dict.end()) fail(std::string("no field '") + name + "'");
    return found->value();
  };
  const auto number = [&](const char* name) {
    const c10::IValue number = field(name);
    if (!number.isInt() || number.toInt() < 0) fail(std::string("no count in '") + name + "'");
    return number.toInt();
  };
  const auto tensor = [&](const char* name) {
    const c10::IValue tensor = field(name);
    if (!tensor.isTensor() || tensor.toTensor().scalar_type() != at::kByte)
      fail(std::string("no bytes in '") + name + "'");
    return tensor.toTensor();
  };
  DataLoaderState state;
  state.iteration = number("iteration");
  state.batches_yielded = number("batches_yielded");
  state.sampler_rng_state = tensor("sampler_rng_state");
  state.default_rng_state = tensor("default_rng_state");
  return state;
}

PreparedStatus::PreparedStatus(detail::PreparedSettings settings, std::optional<at::Generator> generator,
                               std::optional<int64_t> batch_size, std::optional<int64_t> num_samples, bool drop_last,
                               bool is_stream, int64_t skip)
    : settings_(std::move(settings)),
      generator_(std::move(generator)),
      batch_size_(batch_size),
      num_samples_(num_samples),
      drop_last_(drop_last),
      is_stream_(is_stream),
      skip_(skip) {
  if (!generator_) std::erase(settings_.rng_types, RNGType::generator);
}

std::optional<int64_t> PreparedStatus::total_batch_size() const {
  if (!batch_size_) return std::nullopt;
  return settings_.config.split_batches ? *batch_size_ : *batch_size_ * settings_.num_processes;
}

bool PreparedStatus::override_even_batches(std::optional<bool> even) {
  if (is_stream_ || settings_.dispatch) return false;
  even_override_ = even;
  return true;
}

DataLoaderState PreparedStatus::state_dict() const {
  if (loaded_) return *loaded_;
  const bool between_passes = yielded_ == 0 || end_;
  if (!between_passes) return {iteration_, yielded_, sampler_rng_state_, default_rng_state_};
  // The numbers of the pass that just ended are drawn already, so the generator is ready for the next one.
  return {end_ && yielded_ > 0 ? iteration_ + 1 : iteration_, 0, generator_ ? state_of(*generator_) : nothing(),
          nothing()};
}

void PreparedStatus::load_state_dict(const DataLoaderState& state) {
  loaded_ = state;
  iteration_ = state.iteration;
}

void PreparedStatus::begin_pass(const std::function<void(int64_t)>& start) {
  const auto resumed = std::exchange(loaded_, std::nullopt);
  at::Generator default_generator = at::detail::getDefaultCPUGenerator();
  if (resumed && generator_) restore(*generator_, resumed->sampler_rng_state);
  const bool midway = resumed && resumed->batches_yielded > 0;
  if (!midway) synchronize_rng_states(settings_.rng_types, generator_);
  sampler_rng_state_ = generator_ ? state_of(*generator_) : nothing();
  const at::Tensor before = state_of(default_generator);
  if (midway) restore(default_generator, resumed->default_rng_state);
  default_rng_state_ = state_of(default_generator);

  end_ = false;
  remainder_ = -1;
  if (!settings_.dispatch && !is_stream_ && !drop_last_ && num_samples_ && total_batch_size())
    remainder_ = *num_samples_ % *total_batch_size();
  yielded_ = midway ? resumed->batches_yielded : skip_;
  start(yielded_);
  // The order was drawn as in the interrupted pass; everything else goes on from where the program is.
  if (midway) restore(default_generator, before);
  GradientState().add_dataloader(this);
}

void PreparedStatus::end_pass(bool completed) noexcept {
  if (completed) {
    ++iteration_;
    yielded_ = 0;
  }
  try {
    GradientState().remove_dataloader(this);
  } catch (...) {  // the process is going down
  }
}

void PreparedStatus::count_batch(bool last, const std::optional<int64_t>& remainder) {
  ++yielded_;
  if (!last) return;
  end_ = true;
  if (remainder) remainder_ = *remainder;
}

namespace detail {

PreparedSettings resolve(const PrepareDataLoaderOptions& options, bool is_stream, bool can_shard,
                         std::optional<int64_t> batch_size) {
  PreparedSettings settings{.config = options.config, .rng_types = options.rng_types};
  if (options.put_on_device) settings.device = options.device ? *options.device : PartialState().device();
  settings.num_processes = options.num_processes ? *options.num_processes : PartialState().num_processes();
  settings.process_index = options.process_index ? *options.process_index : PartialState().process_index();
  const int64_t ranks = settings.num_processes;
  if (ranks < 1 || settings.process_index < 0 || settings.process_index >= ranks)
    throw ConfigError("prepare_data_loader: found process_index " + std::to_string(settings.process_index) + " of " +
                      std::to_string(ranks) + " processes, expected 0 <= process_index < num_processes");
  settings.dispatch =
      ranks > 1 && options.config.dispatch_batches.value_or(options.put_on_device && is_stream && !can_shard);
  if (settings.dispatch && ranks != comm::world_size())
    throw ConfigError("prepare_data_loader: dispatch_batches is set for " + std::to_string(ranks) +
                      " processes, expected the process group's " + std::to_string(comm::world_size()) +
                      " because batches travel through it; leave num_processes unset or set dispatch_batches = false");
  if (options.config.split_batches && ranks > 1) {
    if (!batch_size)
      throw ConfigError(
          "prepare_data_loader: split_batches is set but the loader has no batch size, expected one that " +
          std::to_string(ranks) +
          " processes can share; batches of varying sizes can't be split, set split_batches = false or give the "
          "sampler a batch_size()");
    if (*batch_size % ranks != 0)
      throw ConfigError("prepare_data_loader: split_batches is set and the batch size is " +
                        std::to_string(*batch_size) + ", expected a multiple of num_processes (" +
                        std::to_string(ranks) +
                        "), because every rank gets an equal piece; change batch_size or set split_batches = false");
  }
  return settings;
}

void throw_not_archivable() {
  throw ConfigError(
      "prepare_data_loader: batches are to be sent between ranks, but their type can't be written to bytes, expected "
      "numbers, strings, tensors, standard containers of them or "
      "structs with ACCELERATE_FIELDS; declare the fields, or set dispatch_batches = false and even_batches = false");
}

void throw_reader_failed(int64_t rank, const std::string& what) {
  throw CommError("DataLoader: rank " + std::to_string(rank) +
                  " failed to read a batch that this rank shares, expected one; its error was: " + what);
}

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return *e.what() ? e.what() : "an exception without a text";
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

Cursor<Indices> RecordingBatchSampler::start() {
  first_ = std::make_shared<Indices>();
  return [next = inner_->start(), first = first_, count = static_cast<size_t>(count_)] {
    auto batch = next();
    for (size_t i = 0; batch && i < batch->size() && first->size() < count; ++i) first->push_back((*batch)[i]);
    return batch;
  };
}

std::shared_ptr<AnyBatchSampler> prepared_sampler(std::shared_ptr<AnyBatchSampler> batches,
                                                  const PreparedSettings& settings) {
  if (settings.config.use_seedable_sampler) {
    const auto fixed = std::dynamic_pointer_cast<BatchSampler>(batches);
    const auto random = fixed ? std::dynamic_pointer_cast<RandomSampler>(fixed->sampler()) : nullptr;
    if (random && !std::dynamic_pointer_cast<SeedableRandomSampler>(random)) {
      auto options = random->options();
      options.generator = random->generator();
      return std::make_shared<BatchSampler>(
          std::make_shared<SeedableRandomSampler>(random->data_size(), settings.config.data_seed, std::move(options)),
          *fixed->batch_size(), fixed->drop_last());
    }
  }
  if (settings.num_processes > 1 && !settings.dispatch && batches->random() && !batches->generator())
    batches->set_generator(seeded_generator(draw_seed(std::nullopt)));
  return batches;
}

}  // namespace detail
}  // namespace accelerate::data
