#pragma once

#include <chrono>
#include <unordered_map>
#include <vector>

#include "accelerate/model/model_ref.hpp"
#include "residency/chain.hpp"

namespace accelerate::parallel::pipeline {

/// How long the operators take that follow each parameter's use, up to the next parameter's.
class Stopwatch final : public residency::Handler {
 public:
  explicit Stopwatch(const NamedTensors& parameters) : milliseconds(parameters.size()) {
    for (size_t i = 0; i < parameters.size(); ++i)
      parameters_[parameters[i].second.storage().unsafeGetStorageImpl()] = i;
  }

  bool handle(residency::OperatorCall& call, residency::Next next) override {
    for (const c10::IValue& argument : call.arguments()) {
      if (!argument.isTensor() || !argument.toTensor().defined() || !argument.toTensor().has_storage()) continue;
      const auto found = parameters_.find(argument.toTensor().storage().unsafeGetStorageImpl());
      if (found != parameters_.end()) current_ = found->second;
    }
    const auto start = std::chrono::steady_clock::now();
    next();
    if (!milliseconds.empty())
      milliseconds[current_] +=
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    return true;
  }

  std::vector<double> milliseconds;  ///< by parameter; what comes before any is the first one's

 private:
  std::unordered_map<const c10::StorageImpl*, size_t> parameters_;
  size_t current_ = 0;
};

}  // namespace accelerate::parallel::pipeline
