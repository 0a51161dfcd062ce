// `accelerate estimate-memory MODEL --strategy …`, which starts this with its options: a training loop of the model,
// run dry as one process of the job.
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel/estimate.hpp>
#include <accelerate/bigmodel/sizes.hpp>
#include <accelerate/models/auto_model.hpp>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>

#include <unistd.h>

#include "input/json.hpp"
#include "input/plain_text.hpp"
#include "input/read_file.hpp"
#include "models/blocks.hpp"
#include "utils/error_text.hpp"
#include "utils/leave_libtorch.hpp"
#include "utils/program_help.hpp"

namespace {

namespace fs = std::filesystem;
namespace models = accelerate::models;
using accelerate::ConfigError;
using accelerate::MemoryUse;

struct EstimateSettings {
  std::string model, strategy, precision = "no";
  int64_t num_processes = 1, batch = 1;
  std::optional<int64_t> tokens;  ///< of a row, where rows are texts
  bool json = false, offload = false;

  /// The stage of ZeRO; nothing for the others.
  std::optional<int64_t> stage() const {
    return strategy.starts_with("zero") ? std::optional<int64_t>(strategy.back() - '0') : std::nullopt;
  }
};

/// The configuration that a user would write for it, the rest of it DeepSpeed's defaults.
nlohmann::ordered_json deepspeed_config(const EstimateSettings& settings) {
  nlohmann::ordered_json zero{{"stage", *settings.stage()}};
  if (settings.offload) zero["offload_optimizer"] = {{"device", "cpu"}};
  if (settings.offload && *settings.stage() == 3) zero["offload_param"] = {{"device", "cpu"}};
  return {{"train_micro_batch_size_per_gpu", settings.batch},
          {"gradient_clipping", 1.0},
          {"bf16", {{"enabled", settings.precision == "bf16"}}},
          {"fp16", {{"enabled", settings.precision == "fp16"}}},
          {"zero_optimization", zero}};
}

/// A model for training, from the config.json of a folder, that file itself, or a built-in config.
class TrainedModel {
 public:
  explicit TrainedModel(const EstimateSettings& settings) : settings_(settings) {
    const auto& name = settings.model;
    std::string text = accelerate::built_in_config(name);
    if (accelerate::is_there(name)) {
      const fs::path file = accelerate::is_folder(name) ? fs::path(name) / "config.json" : fs::path(name);
      if (file.extension() != ".json")
        accelerate::raise<ConfigError>(
            "'{}' holds weights, expected a folder with a config.json, the file itself, or the name of a built-in "
            "model: a dry run builds the model",
            name);
      text = accelerate::read_text<accelerate::CheckpointError>("", file, accelerate::kMostSettingsBytes);
    } else if (text.empty()) {
      accelerate::find_model(name);  // throws, naming what is nearest
    }
    config_ = accelerate::parse_json<nlohmann::ordered_json>(text);
    if (!config_.is_object())
      accelerate::raise<accelerate::CheckpointError>(
          "'{}' has no config.json, or it is no JSON object, expected the model's config", name);
    refuse_codes();
    if (type() == "bert") config_["architectures"] = {"BertForSequenceClassification"};  // the body alone has no loss
    std::string folder = (fs::temp_directory_path() / "accelerate-estimate-XXXXXX").string();
    if (!::mkdtemp(folder.data()))
      accelerate::raise<accelerate::ResourceError>("can't make a folder in {}", fs::temp_directory_path().string());
    folder_ = folder;
    std::ofstream file(folder_ / "config.json");
    file << config_.dump() << std::flush;
    if (!file)
      accelerate::raise<accelerate::ResourceError>("can't write a file in {}. Is the disk full?", folder_.string());
    if (takes_images() && settings.tokens)
      accelerate::raise<ConfigError>("--seq was given, but '{}' takes images, expected --batch alone", name);
  }
  TrainedModel(const TrainedModel&) = delete;
  TrainedModel& operator=(const TrainedModel&) = delete;
  ~TrainedModel() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  models::AutoModel build() const {
    try {
      return models::AutoModel::from_config(folder_);
    } catch (const accelerate::CheckpointError& error) {
      std::string text = error.what();
      const std::string file = (folder_ / "config.json").string();
      if (const size_t at = text.find(file); at != std::string::npos) text.replace(at, file.size(), settings_.model);
      accelerate::raise<ConfigError>(
          "{} Other models can't be built here and run dry; without --strategy the table of their weights is printed",
          text);
    }
  }

  models::AutoModel::Tensors inputs(const at::Device& device) const {
    const auto size_of = [](const nlohmann::ordered_json& size, int64_t i) {
      return size.is_array() ? size.at(static_cast<size_t>(i)).get<int64_t>() : size.get<int64_t>();
    };
    if (takes_images()) {
      const auto size = config_.value("image_size", nlohmann::ordered_json(224));
      return {{"pixel_values", torch::zeros({settings_.batch, config_.value("num_channels", int64_t{3}),
                                             size_of(size, 0), size_of(size, 1)},
                                            device)}};
    }
    const auto ids =
        torch::zeros({settings_.batch, tokens()}, torch::TensorOptions().dtype(torch::kLong).device(device));
    models::AutoModel::Tensors inputs{{"input_ids", ids}};
    if (type() == "t5") inputs["decoder_input_ids"] = ids;
    return inputs;
  }

  bool takes_images() const {
    return type() == "vit" || type() == "resnet" || config_.contains("architecture");
  }  // timm's configs name an architecture
  int64_t tokens() const { return settings_.tokens.value_or(128); }

 private:
  /// Weights in few bits are frozen, so that a training loop of the whole model is none that could be run.
  void refuse_codes() const {
    std::string encoding;
    try {
      if (accelerate::is_there(settings_.model))
        if (const auto model = accelerate::find_model(settings_.model); model.stored) encoding = model.stored->encoding;
    } catch (const accelerate::Error&) {  // the place that builds the model says what is wrong with it
    }
    const bool configured = config_.contains("quantization_config") && !config_["quantization_config"].is_null();
    if (encoding.empty() && !configured) return;
    accelerate::raise<ConfigError>(
        "'{}' has weights in few bits ({}), expected a model in floating point: such weights are frozen, and "
        "--strategy counts the training of all weights with AdamW. Give the model that they were made of, or its "
        "config.json without quantization_config; without --strategy the table has what the files hold",
        settings_.model, encoding.empty() ? "the quantization_config of its config.json" : encoding);
  }

  std::string type() const {
    return config_.contains("model_type") && config_["model_type"].is_string()
               ? config_["model_type"].get<std::string>()
               : "";
  }

  const EstimateSettings& settings_;
  nlohmann::ordered_json config_;
  fs::path folder_;
};

/// The model with a loss for labels that nobody looks at.
struct WithLoss : torch::nn::Module {
  explicit WithLoss(models::AutoModel auto_model) : model(std::move(auto_model)) {
    register_module("model", model.module());
  }
  torch::Tensor forward(const models::AutoModel::Tensors& inputs) {
    const auto logits = model(inputs).at("logits").to(torch::kFloat);
    const auto rows = logits.reshape({-1, logits.size(-1)});
    return torch::cross_entropy_loss(
        rows, torch::zeros({rows.size(0)}, rows.options().dtype(torch::kLong).requires_grad(false)));
  }
  models::AutoModel model;
};

struct EstimateOutcome {
  accelerate::DryRunReport report;
  int64_t parameters = 0;
  std::optional<int64_t> tokens;  ///< of a row; none for images
};

EstimateOutcome run(const EstimateSettings& settings) {
  const TrainedModel trained(settings);
  EstimateOutcome outcome;
  if (!trained.takes_images()) outcome.tokens = trained.tokens();
  outcome.report =
      accelerate::dry_run({.num_processes = settings.num_processes}, [&](const accelerate::DryRunMark& mark) {
        const auto model = [&] {
          auto empty = accelerate::init_empty_weights();
          return std::make_shared<WithLoss>(trained.build());
        }();
        accelerate::AcceleratorOptions options{
            .mixed_precision = settings.precision,
            .kwargs_handlers = {accelerate::DistributedDataParallelKwargs{.gradient_as_bucket_view = true}}};
        if (settings.strategy == "fsdp")
          options.fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{
              .fsdp_version = 1,
              .sharding_strategy = accelerate::ShardingStrategy::full_shard,
              .backward_prefetch = accelerate::BackwardPrefetch::backward_pre,
              .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
              .transformer_cls_names_to_wrap = models::block_classes(*model)};
        if (settings.offload && options.fsdp_plugin) options.fsdp_plugin->cpu_offload = true;
        if (settings.stage()) {
          options.kwargs_handlers.clear();
          options.deepspeed_plugin = accelerate::DeepSpeedPlugin{.hf_ds_config = deepspeed_config(settings).dump()};
        }
        accelerate::Accelerator accelerator(options);
        for (const auto& parameter : model->parameters()) outcome.parameters += parameter.numel();
        torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-4));
        auto [m, opt] = accelerator.prepare(model, optimizer);
        mark("prepare");
        const auto inputs = trained.inputs(accelerator.device());
        for (int step = 0; step < 3; ++step) {  // the first doesn't know yet in which order layers are used
          {
            auto loss = m(inputs);
            mark("forward");
            accelerator.backward(loss);
          }
          mark("backward");
          opt.step();
          mark("step");
          opt.zero_grad();
          mark("zero_grad");
        }
      });
  return outcome;
}

std::string note_of(const EstimateSettings& settings) {
  std::string note = settings.strategy == "fsdp" ? "a dry run of FULL_SHARD"
                     : settings.stage()          ? "a dry run of ZeRO's stage " + std::to_string(*settings.stage())
                                                 : "a dry run of data parallelism";
  if (settings.offload) note += " with what the optimizer works on on the host";
  return note;
}

constexpr const char* kPhases[] = {"forward", "backward", "step"};
constexpr const char* kUses[] = {
    "parameters", "gradients", "optimizer", "whole parameters in use", "gradients under way", "activations and other"};

struct EstimatedStep {
  std::array<accelerate::MemoryByUse, 3> at_peak;
  accelerate::comm::Traffic traffic;
  int64_t peak = 0;
  /// The part of it on the host, where training is offloaded: pieces of parameters, their gradients and states.
  int64_t peak_on_host = 0;
};

EstimatedStep step_of(const EstimateSettings& settings, const EstimateOutcome& outcome) {
  EstimatedStep step;
  for (size_t i = 0; i < 3; ++i) {
    const auto& phase = outcome.report.phase(kPhases[i]);
    step.at_peak[i] = phase.at_peak;
    const auto& memory = step.at_peak[i];
    if (memory.total() > step.peak) {
      step.peak = memory.total();
      step.peak_on_host = settings.offload ? memory.model_states() : 0;
    }
    step.traffic.all_gather += phase.traffic.all_gather, step.traffic.reduce_scatter += phase.traffic.reduce_scatter,
        step.traffic.all_reduce += phase.traffic.all_reduce;
    step.traffic.broadcast += phase.traffic.broadcast, step.traffic.sent += phase.traffic.sent,
        step.traffic.messages += phase.traffic.messages;
  }
  return step;
}

void print_table(const EstimateSettings& settings, const EstimateOutcome& outcome, const EstimatedStep& step) {
  const auto text = [](int64_t bytes) { return accelerate::convert_bytes(static_cast<double>(bytes)); };
  std::printf("Training `%s` with %s on %lld process%s: memory of each, at the highest moment of each phase\n",
              settings.model.c_str(), settings.strategy.c_str(), static_cast<long long>(settings.num_processes),
              settings.num_processes == 1 ? "" : "es");
  const auto rows =
      std::to_string(settings.batch) + (outcome.tokens        ? " x " + std::to_string(*outcome.tokens) + " tokens"
                                        : settings.batch == 1 ? " image"
                                                              : " images");
  std::printf("%lld parameters, AdamW, batch %s a process, mixed precision %s\n\n",
              static_cast<long long>(outcome.parameters), rows.c_str(), settings.precision.c_str());
  std::printf("%-26s%14s%14s%14s\n", "", kPhases[0], kPhases[1], kPhases[2]);
  for (size_t use = 0; use < 6; ++use) {
    std::printf("%-26s", kUses[use]);
    for (const auto& memory : step.at_peak) std::printf("%14s", text(memory.bytes[use]).c_str());
    std::printf("\n");
  }
  std::printf("%-26s", "together");
  for (const auto& memory : step.at_peak) std::printf("%14s", text(memory.total()).c_str());
  std::printf("\n\nPeak: %s\n", text(step.peak).c_str());
  if (settings.offload)
    std::printf("Of that on the host (parameters, gradients, optimizer): %s; on the device: %s\n",
                text(step.peak_on_host).c_str(), text(step.peak - step.peak_on_host).c_str());
  std::printf("Communication of a step: %s in %lld messages, of which %s leave each process\n",
              text(step.traffic.volume()).c_str(), static_cast<long long>(step.traffic.messages),
              text(step.traffic.sent).c_str());
  std::printf("From %s. docs/dry_run.md says what is counted.\n", note_of(settings).c_str());
}

void print_json(const EstimateSettings& settings, const EstimateOutcome& outcome, const EstimatedStep& step) {
  nlohmann::ordered_json phases;
  for (size_t i = 0; i < 3; ++i) {
    auto& phase = phases[kPhases[i]];
    for (int use = 0; use < 6; ++use)
      phase[accelerate::to_string(static_cast<MemoryUse>(use))] = step.at_peak[i].bytes[static_cast<size_t>(use)];
    phase["total"] = step.at_peak[i].total();
  }
  std::cout << nlohmann::ordered_json{{"model", settings.model},
                                      {"strategy", settings.strategy},
                                      {"num_processes", settings.num_processes},
                                      {"batch", settings.batch},
                                      {"seq", outcome.tokens ? nlohmann::ordered_json(*outcome.tokens)
                                                             : nlohmann::ordered_json()},
                                      {"mixed_precision", settings.precision},
                                      {"parameters", outcome.parameters},
                                      {"unit", "bytes"},
                                      {"phases", phases},
                                      {"peak", step.peak},
                                      {"offload", settings.offload},
                                      {"peak_on_host", step.peak_on_host},
                                      {"communication",
                                       {{"volume", step.traffic.volume()},
                                        {"sent", step.traffic.sent},
                                        {"messages", step.traffic.messages}}},
                                      {"from", note_of(settings)}}
                   .dump(2)
            << "\n";
}

EstimateSettings settings_of(const std::vector<std::string>& words) {
  EstimateSettings settings;
  const auto number = [](const std::string& option, const std::string& text) {
    size_t used = 0;
    int64_t value = 0;
    try {
      value = std::stoll(text, &used);
    } catch (const std::exception&) {
    }
    if (used != text.size() || value < 1)
      accelerate::raise<ConfigError>("{} is '{}', expected a whole number from 1 on", option, text);
    return value;
  };
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--json") {
      settings.json = true;
    } else if (word == "--offload") {
      settings.offload = true;
    } else if (!word.starts_with("--")) {
      settings.model = word;
    } else if (i + 1 == words.size()) {
      accelerate::raise<ConfigError>("{} has no value", word);
    } else {
      const std::string& value = words[++i];
      if (word == "--strategy") settings.strategy = value;
      else if (word == "--mixed_precision") settings.precision = value;
      else if (word == "--num_processes") settings.num_processes = number(word, value);
      else if (word == "--batch") settings.batch = number(word, value);
      else if (word == "--seq") settings.tokens = number(word, value);
      else accelerate::raise<ConfigError>("there is no option '{}'. See `accelerate estimate-memory --help`", word);
    }
  }
  if (settings.model.empty())
    accelerate::raise<ConfigError>("found no MODEL, expected a folder, a config.json or the name of a built-in model");
  const std::vector<std::string> strategies{"ddp", "fsdp", "zero1", "zero2", "zero3"};
  if (std::find(strategies.begin(), strategies.end(), settings.strategy) == strategies.end())
    accelerate::raise<ConfigError>("--strategy is '{}', expected ddp, fsdp, zero1, zero2 or zero3", settings.strategy);
  if (settings.offload && settings.strategy == "ddp")
    throw ConfigError(
        "--offload was given with --strategy ddp, whose optimizers work where the model lies, expected fsdp, zero1, "
        "zero2 or zero3");
  return settings;
}

/// c10d warns that its Reducer looks for unused parameters, which a dry run makes it do.
class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

int main(int argc, char** argv) {
  command::show_help_if_asked(argc, argv, "estimate-memory");
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  try {
    const auto settings = settings_of({argv + 1, argv + argc});
    const auto outcome = run(settings);
    const auto step = step_of(settings, outcome);
    if (settings.json) print_json(settings, outcome, step);
    else print_table(settings, outcome, step);
    return 0;
  } catch (const accelerate::Error& error) {
    std::fprintf(stderr, "accelerate estimate-memory: %s\n", accelerate::plain_lines(error.what()).c_str());
    return error.exit_code();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "accelerate estimate-memory: unexpected error: %s\n",
                 accelerate::plain_lines(accelerate::text_of(error)).c_str());
    return 70;
  }
}
