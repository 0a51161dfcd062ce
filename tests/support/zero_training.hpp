#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "accelerate/accelerate.hpp"
#include "accelerate/checkpoint/zero_to_fp32.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "accelerate/parallel/zero_handles.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"
#include "peer_gpt.hpp"

/// The peer's GPT in training by a DeepSpeed configuration, for tests of its checkpoints. The files of
/// tests/dist/deepspeed_checkpoints/ are DeepSpeed 0.19.8's (CPU accelerator, gloo), of that GPT after three steps;
/// expected.json says what it did with them next, and its ds_to_universal made universal.tar.xz of them.
namespace support {

using nlohmann::json;

inline const std::filesystem::path kTheirs =
    std::filesystem::path(ACCELERATE_SOURCE_DIR) / "tests" / "dist" / "deepspeed_checkpoints";
inline constexpr int64_t kVocabulary = 16, kTokens = 4, kBatch = 2;

inline accelerate::DeepSpeedPlugin plugin_of(json config) {
  config["train_micro_batch_size_per_gpu"] = kBatch;
  if (!config.contains("gradient_clipping")) config["gradient_clipping"] = 0.0;
  config.erase("grad_accum_dtype");  // which DeepSpeed passes over there, too
  return {.hf_ds_config = config.dump()};
}

/// The training that a configuration asks for: the model, the optimizer and the schedule.
struct Training {
  explicit Training(const json& config, const json& arguments = json::array())
      : accelerator(accelerate::AcceleratorOptions{.cpu = true, .deepspeed_plugin = plugin_of(config)}),
        model(made(arguments)) {
    const auto dummy = accelerate::DummyOptim(trained(arguments));
    auto [m, opt] = accelerator.prepare(model, dummy);
    prepared.emplace(m), optimizer.emplace(opt);
    if (config.contains("scheduler"))
      schedule.emplace(accelerator.prepare(accelerate::DummyScheduler{.optimizer = dummy}));
  }
  static PeerGpt made(const json& arguments) {
    torch::manual_seed(0);
    return PeerGpt(PeerSizes{}, std::find(arguments.begin(), arguments.end(), "--tie") != arguments.end());
  }
  std::vector<at::Tensor> trained(const json& arguments) {
    const auto freeze = std::find(arguments.begin(), arguments.end(), "--freeze");
    std::vector<at::Tensor> result;
    for (const auto& item : model->named_parameters()) {
      if (freeze != arguments.end() && item.key().starts_with((freeze + 1)->get<std::string>()))
        item.value().set_requires_grad(false);
      if (item.value().requires_grad()) result.push_back(item.value());
    }
    return result;
  }

  struct Curves {
    std::vector<double> losses, rates, scales;
    std::vector<int64_t> skipped;
  };
  /// As the peer: each rank draws batches of its own, the same ones in each call. @param alike  all ranks draw the same
  Curves steps(int64_t count, int64_t seed = 1000, bool alike = false) {
    torch::manual_seed(seed + (alike ? 0 : accelerator.process_index()));
    Curves curves;
    for (int64_t i = 0; i < count; ++i) {
      const auto ids = torch::randint(0, kVocabulary, {kBatch, kTokens + 1}, at::kLong);
      const auto logits = (*prepared)(ids.narrow(1, 0, kTokens)).reshape({-1, kVocabulary}).to(at::kFloat);
      const auto loss = torch::cross_entropy_loss(logits, ids.narrow(1, 1, kTokens).reshape(-1));
      accelerator.backward(loss);
      optimizer->step();
      if (schedule) schedule->step();
      optimizer->zero_grad();
      curves.losses.push_back(loss.item<double>());
      curves.rates.push_back(optimizer->param_groups()[0].options().get_lr());
      curves.scales.push_back(accelerator.scaler() ? accelerator.scaler()->get_scale() : 1.0);
      curves.skipped.push_back(optimizer->step_counts().skipped);
    }
    return curves;
  }
  /// Whole masters by name.
  std::map<std::string, at::Tensor> weights() {
    std::map<std::string, at::Tensor> result;
    for (const auto& item : model->named_parameters())
      result[item.key()] = accelerate::safe_get_full_fp32_param(item.value());
    return result;
  }
  std::map<std::string, at::Tensor> moments(const char* kind = "exp_avg") {
    std::map<std::string, at::Tensor> result;
    for (const auto& item : model->named_parameters())
      if (item.value().requires_grad())
        result[item.key()] = accelerate::safe_get_full_optimizer_state(item.value(), kind);
    return result;
  }

  accelerate::Accelerator accelerator;
  PeerGpt model;
  std::optional<accelerate::Prepared<PeerGpt>> prepared;
  std::optional<accelerate::AcceleratedOptimizer> optimizer;
  std::optional<accelerate::AcceleratedScheduler> schedule;
};

inline void expect_same(const std::map<std::string, at::Tensor>& ours,
                        const std::map<std::string, at::Tensor>& expected) {
  for (const auto& [name, value] : ours) {
    ASSERT_TRUE(expected.contains(name)) << name;
    ASSERT_EQ(value.defined(), expected.at(name).defined()) << name;
    if (!value.defined()) continue;  // all steps were skipped
    EXPECT_TRUE(at::equal(value, expected.at(name).to(value.scalar_type())))
        << name << ": " << (value - expected.at(name)).abs().max();
  }
}

/// The error of load_checkpoint() for a copy of a tag in which something was changed; `name` is the copy's. Collective.
inline std::string refusal_of_changed(Training& training, const std::filesystem::path& folder, const std::string& tag,
                                      const std::string& name,
                                      const std::function<void(const std::filesystem::path&)>& change) {
  if (training.accelerator.is_main_process()) {
    std::filesystem::copy(folder / tag, folder / name, std::filesystem::copy_options::recursive);
    change(folder / name);
  }
  training.accelerator.wait_for_everyone();
  return message_of<accelerate::CheckpointError>([&] { training.prepared->load_checkpoint(folder, name); });
}

/// Whatever changed files say: weights, or an error that names them.
struct ReadDamaged {
  std::mt19937 draw{7};
  size_t refused = 0, read = 0;

  /// Some of the first bytes, where pickles stand.
  std::string damaged(std::string bytes, size_t among) {
    for (int change = 0; change < 3; ++change)
      bytes[draw() % std::min(bytes.size(), among)] = static_cast<char>(draw());
    return bytes;
  }
  void look(const std::filesystem::path& folder) {
    try {
      accelerate::get_fp32_state_dict_from_zero_checkpoint(folder);
      ++read;
    } catch (const accelerate::Error&) {
      ++refused;
    }  // anything else ends the test
  }
};

inline json read_json(const std::filesystem::path& file) {
  std::ifstream in(file);
  return json::parse(in);
}

inline json config_of(int64_t stage, const std::string& precision = "") {
  json config = {
      {"zero_optimization", {{"stage", stage}, {"stage3_param_persistence_threshold", 10}}},
      {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}, {"weight_decay", 0.1}}}}},
      {"scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_max_lr", 0.01}, {"warmup_num_steps", 10}}}}}};
  if (!precision.empty()) config[precision] = {{"enabled", true}};
  if (precision == "fp16") config["fp16"]["initial_scale_power"] = 18, config["fp16"]["hysteresis"] = 1;
  return config;
}

/// The tree of an archive as text: keys, kinds, dtypes and sizes.
inline void describe(const c10::IValue& value, const std::string& path, std::map<std::string, std::string>& into) {
  if (value.isTensor())
    into[path] = fmt::format("{} {}", c10::toString(value.toTensor().scalar_type()), value.toTensor().sizes());
  else if (value.isGenericDict()) {
    into[path] = "dict";
    for (const auto& entry : value.toGenericDict())
      describe(entry.value(),
               path + "/" + (entry.key().isString() ? entry.key().toStringRef() : std::to_string(entry.key().toInt())),
               into);
  } else if (value.isList() || value.isTuple()) {
    into[path] = "list";
    int64_t i = 0;
    const auto items = value.isList() ? value.toListRef() : at::ArrayRef<c10::IValue>(value.toTupleRef().elements());
    for (const c10::IValue& child : items) describe(child, path + "/" + std::to_string(i++), into);
  } else into[path] = value.tagKind();
}
inline std::map<std::string, std::string> tree_of(const std::filesystem::path& path) {
  const auto file = std::make_shared<accelerate::formats::InputFile>(path);
  std::map<std::string, std::string> result;
  describe(accelerate::formats::TorchArchive(file, 0, file->size(), path.string(),
                                             accelerate::formats::PickledObjects::as_data)
               .value([](const accelerate::formats::SavedTensor& saved) {
                 return at::empty(saved.sizes, at::TensorOptions().dtype(saved.dtype).device(at::kMeta));
               }),
           "", result);
  return result;
}

}  // namespace support
