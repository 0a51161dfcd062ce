#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

#include "accelerate/checkpoint.hpp"
#include "utils/raise.hpp"

namespace accelerate::checkpointing {
namespace {

constexpr const char* kStep = "step";
constexpr const char* kCpu = "torch_manual_seed";

/// The reference's key for the generators of a device kind, e.g. torch_cuda_manual_seed.
std::string device_key(const at::Device& device) {
  return "torch_" + c10::DeviceTypeName(device.type(), true) + "_manual_seed";
}

at::Tensor state_of(at::Generator generator) {
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

c10::IValue random_states(int64_t step, const at::Device& device) {
  c10::impl::GenericDict states(c10::StringType::get(), c10::AnyType::get());
  states.insert(kStep, step);
  states.insert(kCpu, state_of(at::detail::getDefaultCPUGenerator()));
  if (!device.is_cpu()) states.insert(device_key(device), state_of(at::globalContext().defaultGenerator(device)));
  return states;
}

int64_t load_random_states(const c10::IValue& states, const at::Device& device) {
  if (!states.isGenericDict()) raise<CheckpointError>("random states: found {}, expected a dict", states.tagKind());
  const auto dict = states.toGenericDict();
  if (!dict.contains(kStep) || !dict.contains(kCpu) || !dict.at(kCpu).isTensor())
    throw CheckpointError("random states: found a dict without 'step' or 'torch_manual_seed', expected both");
  set_state(at::detail::getDefaultCPUGenerator(), dict.at(kCpu).toTensor());
  if (!device.is_cpu() && dict.contains(device_key(device)) && dict.at(device_key(device)).isTensor())
    set_state(at::globalContext().defaultGenerator(device), dict.at(device_key(device)).toTensor());
  return dict.at(kStep).toInt();
}

}  // namespace accelerate::checkpointing
