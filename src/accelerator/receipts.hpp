#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "accelerate/accelerator.hpp"
#include "accelerate/utils/kwargs_dict.hpp"
#include "accelerate/utils/receipts.hpp"
#include "accelerator/fp8.hpp"
#include "utils/counts.hpp"

/// The table behind Accelerator::receipts(): a row for each setting that changes what a run does. tests/structure
/// checks that every field of the option structs has one, or is listed with the reason in receipts_left_out.txt.
namespace accelerate::receipts {

using counts::Count;

/// What receipts are made from. A default one is a run that nobody asked anything of.
struct Facts {
  // What the program gave.
  AcceleratorOptions given;
  DistributedDataParallelKwargs ddp;
  GradScalerKwargs scaling;
  InitProcessGroupKwargs process_group;
  AutocastKwargs autocast;
  GradientAccumulationPlugin accumulation;
  FullyShardedDataParallelPlugin fsdp;
  MixedPrecision precision_policy;
  CPUOffload cpu_offload;
  StateDictConfig state_dict_config, optim_state_dict_config;
  ParallelismConfig parallelism;
  AORecipeKwargs ao;
  TERecipeKwargs te;
  MSAMPRecipeKwargs msamp;

  // What holds.
  ChosenFp8 fp8;
  FP8Training::Counts fp8_counts;  ///< of all prepared models
  int64_t fp8_weights = 0;
  DataLoaderConfiguration loading;
  GradientAccumulationPlugin accumulating;
  ProjectConfiguration project;
  TorchDynamoPlugin compiling;                             ///< resolved
  std::optional<FullyShardedDataParallelPlugin> sharding;  ///< resolved; nothing: models are not sharded
  std::optional<ParallelismConfig> layout;                 ///< resolved; nothing: nobody asked for one
  int64_t ranks = 1, machines = 1, models = 0, optimizers = 0, schedulers = 0;
  at::Device device = at::kCPU;
  std::optional<at::DeviceType> accelerator;  ///< that LibTorch can use here
  PrecisionType precision = PrecisionType::NO;
  std::optional<double> loss_scale;  ///< now; nothing: no loss was scaled
  std::string backend;
  bool debug = false, main_process = true;
  int64_t fetches = 0, fetches_ahead = 0, evictions = 0;  ///< of sharded units

  int64_t operator[](Count what) const { return counts::read(what); }
  /// What the resolved plugin says of precision; empty where there is none.
  MixedPrecision policy() const {
    return sharding ? sharding->mixed_precision_policy.value_or(MixedPrecision{}) : MixedPrecision{};
  }
};

/// What a setting did, in words.
struct Deed {
  ReceiptState state;
  std::string text;
};
template <class... Args> Deed acted(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::acted, fmt::format(text, std::forward<Args>(args)...)};
}
/// Its occasion has not come.
template <class... Args> Deed not_due(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::not_due, "not yet: " + fmt::format(text, std::forward<Args>(args)...)};
}
/// Its value asks for nothing, or for what is so without it.
template <class... Args> Deed off(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::not_due, fmt::format(text, std::forward<Args>(args)...)};
}
template <class... Args> Deed nothing(fmt::format_string<Args...> text, Args&&... args) {
  return {ReceiptState::without_effect, fmt::format(text, std::forward<Args>(args)...)};
}

/// "1 batch", "40 batches".
inline std::string counted(int64_t n, const char* one, const char* many) {
  return fmt::format("{} {}", n, n == 1 ? one : many);
}
inline std::string bytes(int64_t n) {
  return n < 10'000 ? fmt::format("{} bytes", n) : fmt::format("{:.2f} MB", static_cast<double>(n) / 1e6);
}

// Values as texts.

inline std::string text_of(bool value) { return value ? "true" : "false"; }
inline std::string text_of(const std::string& value) { return value; }
inline std::string text_of(const std::filesystem::path& value) { return value.string(); }
inline std::string text_of(const TrackerChoice& value) { return value.name(); }
inline std::string text_of(std::chrono::milliseconds value) { return fmt::format("{} ms", value.count()); }
inline std::string text_of(const PowerSGDOptions& value) {
  return fmt::format("rank {} from step {} on", value.matrix_approximation_rank, value.start_powerSGD_iter);
}
inline std::string text_of(const Float8LinearConfig& value) { return value.recipe; }
inline std::string text_of(const std::array<bool, 3>& value) {
  return fmt::format("{},{},{}", value[0], value[1], value[2]);
}
inline std::string text_of(at::ScalarType value) { return c10::toString(value); }
inline std::string text_of(GradientAverage value) { return value == GradientAverage::steps ? "steps" : "tokens"; }
inline std::string text_of(RNGType value) {
  return value == RNGType::torch ? "torch" : value == RNGType::device ? "device" : "generator";
}
inline std::string text_of(DDPCommunicationHookType value) {
  constexpr const char* kNames[] = {"no", "fp16", "bf16", "power_sgd", "batched_power_sgd"};
  return kNames[static_cast<size_t>(value)];
}
template <class T>
requires std::is_arithmetic_v<T> std::string text_of(T value) { return fmt::format("{}", value); }
template <class T>
requires requires(T value) { to_string(value); }
std::string text_of(T value) { return to_string(value); }
template <class T> std::string text_of(const std::vector<T>& values) {
  std::vector<std::string> texts;
  for (const auto& value : values) texts.push_back(text_of(value));
  return fmt::format("{}", fmt::join(texts, ","));
}
template <class... T> std::string text_of(const std::variant<T...>& value) {
  return std::visit([](const auto& one) { return text_of(one); }, value);
}
template <class T> std::string text_of(const std::optional<T>& value) { return value ? text_of(*value) : "unset"; }

/// A value, and whether the program gave it: whether it is another one than by default.
struct Asked {
  bool by_call;
  std::string value;
};
/// The setting at Facts.*….
template <auto... Path> Asked asked(const Facts& facts) {
  static const Facts defaults{};
  const auto& value = (facts.*....*Path);
  return {value != (defaults.*....*Path), text_of(value)};
}

struct Row {
  const char* setting;
  const char* variable;  ///< by which the launcher, or a user, sets it too; null: there is none
  const char* expected;
  Asked (*asked)(const Facts&);
  Deed (*did)(const Facts&);
  bool variable_wins = false;  ///< over the call
};

inline constexpr const char* kSaving = "when save_state() is called";

/// The rows, in four files.
std::vector<Row> rows_of_loading();
std::vector<Row> rows_of_training();
std::vector<Row> rows_of_sharding();
std::vector<Row> rows_of_fp8();

Receipts make(const Facts& facts);

}  // namespace accelerate::receipts
