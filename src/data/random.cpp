#include "accelerate/data/random.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <string>

#include "accelerate/comm.hpp"
#include "data/counts.hpp"
#include "utils/raise.hpp"

namespace accelerate {
namespace {

std::optional<at::Generator> default_device_generator() {
  const auto kind = at::getAccelerator(false);
  if (!kind || at::accelerator::deviceCount() < 1) return std::nullopt;  // LibTorch for GPUs, on a machine without one
  return at::globalContext().defaultGenerator(at::Device(*kind, at::accelerator::getDeviceIndex()));
}

/// States travel as bytes: they live on the CPU whatever the back end sends natively.
void broadcast_state(at::Generator generator) {
  std::string bytes;
  {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().contiguous();
    bytes.assign(static_cast<const char*>(state.data_ptr()), state.nbytes());
  }
  bytes = comm::broadcast_bytes(bytes, 0);
  at::Tensor state = at::empty({static_cast<int64_t>(bytes.size())}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

void set_seed(int64_t seed, const SetSeedOptions& options) {
  if (options.device_specific) seed += comm::rank();
  at::manual_seed(static_cast<uint64_t>(seed));
  if (options.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

void synchronize_rng_state(RNGType type, const std::optional<at::Generator>& generator) {
  if (type == RNGType::generator && !generator)
    raise<ConfigError>(
        "synchronize_rng_state: found no generator, expected one because the type is RNGType::generator; pass the "
        "sampler's generator or another type");
  if (comm::world_size() == 1) return;
  if (type == RNGType::generator) {
    broadcast_state(*generator);
    counts::add(data::DataCount::generators_sent);
  } else if (type == RNGType::torch) {
    broadcast_state(at::detail::getDefaultCPUGenerator());
    counts::add(data::DataCount::default_generators_sent);
  } else if (const auto device = default_device_generator()) {
    broadcast_state(*device);
    counts::add(data::DataCount::device_generators_sent);
  }
}

void synchronize_rng_states(const std::vector<RNGType>& types, const std::optional<at::Generator>& generator) {
  for (const RNGType type : types) synchronize_rng_state(type, generator);
}

}  // namespace accelerate
