#include <ATen/core/Dict.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include <string>

#include "accelerate/data/prepared_status.hpp"
#include "utils/raise.hpp"

namespace accelerate::data {

c10::IValue DataLoaderState::to_ivalue() const {
  const auto bytes = [](const at::Tensor& state) {
    return state.defined() ? state : at::empty({0}, at::TensorOptions().dtype(at::kByte));
  };
  c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
  dict.insert("iteration", iteration);
  dict.insert("batches_yielded", batches_yielded);
  dict.insert("sampler_rng_state", bytes(sampler_rng_state));
  dict.insert("default_rng_state", bytes(default_rng_state));
  dict.insert("samples_before", samples_before);
  dict.insert("total_batch_size", total_batch_size);
  dict.insert("num_processes", num_processes);
  return dict;
}

DataLoaderState DataLoaderState::from_ivalue(const c10::IValue& value) {
  const auto fail = [](const std::string& found) {
    raise<CheckpointError>(
        "DataLoaderState: found {}, expected a dictionary with iteration, batches_yielded, sampler_rng_state and "
        "default_rng_state; the file is not a loader's state or comes from another version",
        found);
  };
  if (!value.isGenericDict()) fail(fmt::format("a {}", value.tagKind()));
  const auto dict = value.toGenericDict();
  const auto field = [&](const char* name) {
    const auto found = dict.find(name);
    if (found == dict.end()) fail(fmt::format("no field '{}'", name));
    return found->value();
  };
  const auto number = [&](const char* name) {
    const c10::IValue number = field(name);
    if (!number.isInt() || number.toInt() < 0) fail(fmt::format("no count in '{}'", name));
    return number.toInt();
  };
  const auto tensor = [&](const char* name) {
    const c10::IValue tensor = field(name);
    if (!tensor.isTensor() || tensor.toTensor().scalar_type() != at::kByte) fail(fmt::format("no bytes in '{}'", name));
    return tensor.toTensor();
  };
  DataLoaderState state;
  state.iteration = number("iteration");
  state.batches_yielded = number("batches_yielded");
  state.sampler_rng_state = tensor("sampler_rng_state");
  state.default_rng_state = tensor("default_rng_state");
  if (dict.contains("num_processes")) {
    state.samples_before = number("samples_before");
    state.total_batch_size = number("total_batch_size");
    state.num_processes = number("num_processes");
  }
  return state;
}

}  // namespace accelerate::data
