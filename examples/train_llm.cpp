// Trains a causal language model on texts or conversations, whole or sharded, from its weights or from scratch.
// docs/train_a_language_model.md walks through it.
//   build/release/bin/train_llm --max_steps 20
//   accelerate launch --num_processes 2 --use_fsdp build/release/bin/train_llm --max_steps 20 --save_every 10
//   accelerate launch --num_processes 2 --use_fsdp build/release/bin/train_llm --max_steps 20 --save_every 10 --resume
//   accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 build/release/bin/train_llm --max_steps 20
//   build/release/bin/train_llm --model llama-2-7b --dry_run 8 --dtype bfloat16 --batch_size 10 --seq_length 1024
#include <accelerate/accelerate.hpp>
#include <accelerate/adapters.hpp>
#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/model/no_split.hpp>
#include <accelerate/models/auto_model.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/models/tokenizer.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "arguments.hpp"
#include "texts.hpp"

namespace fs = std::filesystem;
namespace examples = accelerate_examples;
namespace models = accelerate::models;

namespace {

struct Settings {
  fs::path model;         ///< a folder, a .gguf file, or the name of a folder in examples/configs
  std::string tokenizer;  ///< empty: the model's
  std::string data, prompt, precision, dtype, output_dir;
  int64_t seq_length, batch_size, accumulation, epochs, max_steps, save_every, log_every, max_new_tokens, numel_to_wrap,
      lora, dry_run, seed;
  double lr, peak_flops;
  bool from_scratch, cpu_offload, activation_checkpointing, load_in_4bit, resume, with_tracking;
};

/// 100_000_000, as people write it.
int64_t number(std::string text) {
  std::erase(text, '_');
  try {
    size_t used = 0;
    const auto value = std::stoll(text, &used);
    if (used == text.size() && value >= 0) return value;
  } catch (const std::exception&) {
  }
  throw accelerate::ConfigError("--numel_to_wrap is '" + text + "', expected a number of parameters");
}

Settings read(examples::Arguments args) {
  Settings settings{
      .model = args.get<std::string>("--model", ".deps/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
      .tokenizer = args.get<std::string>("--tokenizer", ""),
      .data = args.get<std::string>("--data", ".deps/data/pairs.tsv"),
      .prompt = args.get<std::string>("--prompt", "In the beginning"),
      .precision = args.get<std::string>("--mixed_precision", ""),
      .dtype = args.get<std::string>("--dtype", "float32"),
      .output_dir = args.get<std::string>("--output_dir", "build/train_llm_output"),
      .seq_length = args.get<int64_t>("--seq_length", 256),
      .batch_size = args.get<int64_t>("--batch_size", 4),
      .accumulation = args.get<int64_t>("--gradient_accumulation_steps", 1),
      .epochs = args.get<int64_t>("--num_epochs", 1),
      .max_steps = args.get<int64_t>("--max_steps", 0),
      .save_every = args.get<int64_t>("--save_every", 0),
      .log_every = args.get<int64_t>("--log_every", 10),
      .max_new_tokens = args.get<int64_t>("--max_new_tokens", 32),
      .numel_to_wrap = number(args.get<std::string>("--numel_to_wrap", "0")),
      .lora = args.get<int64_t>("--lora", 0),
      .dry_run = args.get<int64_t>("--dry_run", 0),
      .seed = args.get<int64_t>("--seed", 42),
      .lr = args.get<double>("--lr", 3e-5),
      .peak_flops = args.get<double>("--peak_flops", 0),
      .from_scratch = args.flag("--from_scratch"),
      .cpu_offload = args.flag("--cpu_offload"),
      .activation_checkpointing = args.flag("--activation_checkpointing"),
      .load_in_4bit = args.flag("--load_in_4bit"),
      .resume = args.flag("--resume"),
      .with_tracking = args.flag("--with_tracking"),
  };
  args.check();
  const fs::path shape = "examples/configs" / (settings.model == "llama" ? fs::path("llama-3-8b") : settings.model);
  if (!fs::exists(settings.model) && fs::exists(shape)) settings.model = shape;
  if (!fs::exists(settings.model))
    throw accelerate::ConfigError("--model '" + settings.model.string() +
                                  "' is not there; expected a folder, a .gguf file, or a name of examples/configs");
  const bool has_weights = fs::is_regular_file(settings.model) || fs::exists(settings.model / "model.safetensors") ||
                           fs::exists(settings.model / "model.safetensors.index.json") ||
                           fs::exists(settings.model / "pytorch_model.bin") ||
                           fs::exists(settings.model / "pytorch_model.bin.index.json");
  settings.from_scratch |= !has_weights;
  if (settings.dtype != "float32" && settings.dtype != "bfloat16")
    throw accelerate::ConfigError("--dtype is '" + settings.dtype + "', expected float32 or bfloat16");
  if (settings.dry_run > 0 && (settings.lora > 0 || settings.load_in_4bit || settings.resume || settings.with_tracking))
    throw accelerate::ConfigError(
        "--dry_run is of training in full, without --lora, --load_in_4bit, --resume and "
        "--with_tracking");
  if (settings.load_in_4bit && settings.lora == 0) settings.lora = 8;  // codes can't be trained themselves
  if (settings.load_in_4bit && settings.from_scratch)
    throw accelerate::ConfigError("--load_in_4bit needs weights, and '" + settings.model.string() + "' has none");
  return settings;
}

at::ScalarType dtype_of(const Settings& settings) {
  return settings.dtype == "bfloat16" ? torch::kBFloat16 : torch::kFloat;
}

/// How the model is sharded; nothing where nobody asks for it. `accelerate launch` decides what is left open here, but
/// for three defaults: units are layers, checkpoints are of all ranks' pieces, and rank 0 alone reads the weights.
std::optional<accelerate::FullyShardedDataParallelPlugin> plugin_of(const Settings& settings) {
  if (accelerate::parallel::deepspeed_requested()) {
    if (settings.numel_to_wrap > 0 || settings.cpu_offload || settings.activation_checkpointing)
      throw accelerate::ConfigError(
          "--numel_to_wrap, --cpu_offload and --activation_checkpointing are settings of FSDP, and this run goes by "
          "DeepSpeed's; say --offload_optimizer_device cpu and the like to `accelerate launch`, or launch with "
          "--use_fsdp");
    return std::nullopt;
  }
  const bool launched = accelerate::parallel::fsdp_requested(),
             asked = settings.numel_to_wrap > 0 || settings.cpu_offload || settings.dry_run > 0;
  if (!launched && !asked && !settings.activation_checkpointing) return std::nullopt;
  accelerate::FullyShardedDataParallelPlugin plugin;
  // Recomputing is the sharding engine's; with no_shard every rank holds all, as under DDP.
  if (!launched && !asked) plugin.sharding_strategy = accelerate::ShardingStrategy::no_shard;
  if (settings.numel_to_wrap > 0) {
    plugin.auto_wrap_policy = accelerate::AutoWrapPolicy::size_based_wrap;
    plugin.min_num_params = settings.numel_to_wrap;
  } else if (!std::getenv("FSDP_AUTO_WRAP_POLICY")) {
    plugin.auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap;
  }
  if (settings.cpu_offload) plugin.cpu_offload = true;
  if (settings.activation_checkpointing) plugin.activation_checkpointing = true;
  if (!std::getenv("FSDP_STATE_DICT_TYPE")) plugin.state_dict_type = accelerate::StateDictType::sharded_state_dict;
  if (!std::getenv("FSDP_CPU_RAM_EFFICIENT_LOADING")) plugin.cpu_ram_efficient_loading = !settings.from_scratch;
  return plugin;
}

accelerate::AcceleratorOptions options_of(const Settings& settings) {
  accelerate::AcceleratorOptions options{
      .dataloader_config = {.use_stateful_dataloader = true},
      .project_config = {.project_dir = settings.output_dir, .automatic_checkpoint_naming = true, .total_limit = 2},
      // Every token weighs the same, however many of a batch's are learned.
      .gradient_accumulation_plugin = accelerate::GradientAccumulationPlugin{
          .num_steps = settings.accumulation, .average = accelerate::GradientAverage::tokens}};
  options.fsdp_plugin = plugin_of(settings);
  if (!settings.precision.empty()) options.mixed_precision = settings.precision;
  if (settings.with_tracking) options.log_with = {"tensorboard", "jsonl"};
  return options;
}

/// Without memory yet.
models::AutoModelForCausalLM build(const Settings& settings) {
  const auto usual = c10::get_default_dtype();
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype_of(settings)));
  auto empty = accelerate::init_empty_weights();
  auto model = models::AutoModelForCausalLM::from_config(settings.model);
  c10::set_default_dtype(usual);
  return model;
}

/// Weights without values get them in prepare(): fresh ones, or those that rank 0 has read.
models::AutoModelForCausalLM load(const Settings& settings, const accelerate::Accelerator& accelerator) {
  if (settings.load_in_4bit) {
    const auto dtype = accelerator.mixed_precision() == "bf16" ? torch::kBFloat16 : torch::kFloat;
    const accelerate::BnbQuantizationConfig nf4{
        .load_in_4bit = true, .bnb_4bit_quant_type = "nf4", .bnb_4bit_compute_dtype = dtype};
    return models::AutoModelForCausalLM::from_pretrained(settings.model, {.quantization = nf4});
  }
  const auto& plugin = accelerator.options().fsdp_plugin;
  const bool from_rank_0 = ((plugin && plugin->cpu_ram_efficient_loading.value_or(false)) ||
                            accelerator.distributed_type() == accelerate::DistributedType::DEEPSPEED) &&
                           settings.lora == 0;
  if (!settings.from_scratch && (!from_rank_0 || accelerator.is_main_process()))
    return models::AutoModelForCausalLM::from_pretrained(settings.model, {.dtype = dtype_of(settings)});
  auto model = build(settings);
  if (settings.lora > 0) accelerate::materialize(model);  // an adapter is for weights that are there
  return model;
}

/// The operations of a token: 2 for each parameter that is multiplied with, in the forward, for the gradient of its
/// input and, where it is trained, for its own; and attention's scores over the context (arXiv:2204.02311, appendix B).
struct Costs {
  int64_t parameters = 0, trained = 0, vocabulary = 0;
  double flops = 0;
  Costs(const accelerate::ModelRef& model, int64_t seq_length) {
    int64_t width = 0, layers = 0, read = 0;
    for (const auto& module : model.submodules()) {
      layers += dynamic_cast<const accelerate::NoSplit*>(module.module) != nullptr ? 1 : 0;
      if (module.class_name != "Embedding") continue;
      const auto& table = module.parameters.front().second;
      if (vocabulary == 0) vocabulary = table.size(0), width = table.size(1);
      read += table.numel();
    }
    int64_t multiplied = 0, learned = 0;
    bool has_head = false;
    for (const auto& [name, parameter] : model.parameters()) {
      parameters += parameter.numel();
      if (parameter.requires_grad()) trained += parameter.numel();
      has_head |= name.starts_with("lm_head") || name.starts_with("embed_out");
    }
    multiplied = parameters - read + (has_head ? 0 : vocabulary * width);  // a tied table is the head's matrix, too
    learned = trained == parameters ? multiplied : trained;
    flops = 4.0 * static_cast<double>(multiplied) + 2.0 * static_cast<double>(learned) +
            12.0 * static_cast<double>(layers * width * seq_length);
  }
};

/// Operations per second of a large product, in the dtype that the model computes in: MFU is a share of it where
/// --peak_flops does not say it.
double measured_peak(const accelerate::Accelerator& accelerator) {
  const auto dtype = accelerator.mixed_precision() == "bf16"   ? torch::kBFloat16
                     : accelerator.mixed_precision() == "fp16" ? torch::kHalf
                                                               : torch::kFloat;
  const int64_t n = accelerator.device().is_cpu() ? 1024 : 8192;
  const auto a = torch::rand({n, n}, torch::TensorOptions().dtype(dtype).device(accelerator.device()));
  double best = 0;
  for (int i = 0; i < 4; ++i) {
    const auto start = std::chrono::steady_clock::now();
    a.mm(a).sum().item<float>();  // waits for it
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best =
        std::max(best, 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n) / time.count());
  }
  return best;
}

/// Memory of the accelerator, or of the process where there is none: now, and at most since the last look.
struct MemoryLook {
  int64_t valley = 0, peak = 0;
  explicit MemoryLook(const accelerate::Accelerator& accelerator) {
    const auto now = accelerator.memory();
    valley = now.resident, peak = now.peak_resident;
    if (!now.devices.empty()) valley = now.devices[0].allocated, peak = now.devices[0].peak_allocated;
    accelerate::reset_peak_memory();
  }
};

/// Copies the files that `accelerate generate` and transformers want beside the weights.
void copy_settings(const fs::path& from, const fs::path& to) {
  if (!fs::is_directory(from)) return;
  for (const auto& file : fs::directory_iterator(from)) {
    const auto name = file.path().filename().string();
    const bool wanted = name == "config.json" || name == "generation_config.json" ||
                        name == "special_tokens_map.json" || name == "vocab.json" || name == "merges.txt" ||
                        name == "added_tokens.json" || name.starts_with("tokenizer") || name == "chat_template.jinja";
    if (wanted) fs::copy_file(file.path(), to / name, fs::copy_options::overwrite_existing);
  }
}

struct Progress {
  int64_t steps = 0;
  double loss = 0;  ///< of the last step
  ACCELERATE_FIELDS(steps, loss)
};

void train(const Settings& settings) {
  accelerate::Accelerator accelerator(options_of(settings));
  accelerate::set_seed(settings.seed);

  const auto tokenizer = models::Tokenizer::from_pretrained(
      !settings.tokenizer.empty() ? fs::path(settings.tokenizer)
      : fs::exists(settings.model / "tokenizer.json") || fs::exists(settings.model / "vocab.json") ||
              fs::is_regular_file(settings.model)
          ? settings.model
          : fs::path(".deps/data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"));
  examples::Packing packing(tokenizer);
  for (const auto& document : examples::read_documents(settings.data)) packing.add(document);
  const auto blocks = packing.blocks(settings.seq_length);
  auto loader =
      accelerate::data::DataLoader(blocks, {.batch_size = settings.batch_size, .shuffle = true, .seed = settings.seed});
  accelerator.print(packing.tokens(), "tokens in", blocks.size(), "blocks of", settings.seq_length);
  if (!tokenizer.eos_token_id())
    accelerator.print("the tokenizer names no end of a text: documents follow each other without one");

  const auto model = load(settings, accelerator);
  std::optional<accelerate::LoraAdapter> adapter;
  if (settings.lora > 0)
    adapter = accelerate::add_adapter(model, {.r = settings.lora,
                                              .lora_alpha = 2.0 * static_cast<double>(settings.lora),
                                              .target_modules = {"all-linear"},
                                              .base_model_name_or_path = settings.model.string(),
                                              .task_type = "CAUSAL_LM"});
  const Costs costs(model, settings.seq_length);
  if (packing.largest_id() >= costs.vocabulary)
    throw accelerate::ConfigError("the tokenizer gives ids up to " + std::to_string(packing.largest_id()) +
                                  ", and the model has embeddings of " + std::to_string(costs.vocabulary) +
                                  " tokens; give the --tokenizer that belongs to it");
  if (const auto most = model.max_positions(); most && *most < settings.seq_length)
    throw accelerate::ConfigError("--seq_length is " + std::to_string(settings.seq_length) +
                                  ", and the model has positions for " + std::to_string(*most));

  std::vector<torch::Tensor> learned;
  for (const auto& parameter : model.module()->parameters())
    if (parameter.requires_grad()) learned.push_back(parameter);
  auto optimizer = torch::optim::AdamW(learned, torch::optim::AdamWOptions(settings.lr));
  // Steps of the optimizer. A schedule counts each rank's.
  const int64_t ranks = accelerator.num_processes(), accumulation = accelerator.gradient_accumulation_steps(),
                batches = (loader.size() + ranks - 1) / ranks,
                steps_of_epoch = (batches + accumulation - 1) / accumulation,
                total = settings.max_steps > 0 ? settings.max_steps : settings.epochs * steps_of_epoch;
  auto schedule = accelerate::optim::cosine_schedule_with_warmup(optimizer, ranks * total / 20, ranks * total);
  auto [m, opt, dl, sched] = accelerator.prepare(model, optimizer, loader, schedule);
  accelerator.print(costs.trained, "of", costs.parameters, "parameters are trained on", ranks,
                    "process(es):", to_string(accelerator.distributed_type()));

  Progress progress;
  accelerator.register_for_checkpointing(progress);
  if (settings.resume) {
    accelerator.load_state();
    accelerator.print("resumed after step", progress.steps);
  }
  const double peak = settings.peak_flops > 0 ? settings.peak_flops : measured_peak(accelerator);
  if (settings.with_tracking)
    accelerator.init_trackers("train_llm", {{"model", settings.model.string()},
                                            {"seq_length", settings.seq_length},
                                            {"batch_size", settings.batch_size},
                                            {"lr", settings.lr}});

  m->train();
  const MemoryLook before(accelerator);
  accelerate::ProgressBar bar({.total = total, .description = "training"});
  bar.update(progress.steps);
  auto sums = torch::zeros({2}, torch::TensorOptions().dtype(torch::kDouble).device(accelerator.device()));
  auto since = std::chrono::steady_clock::now();
  int64_t tokens = 0;  // of this rank since the last look
  while (progress.steps < total) {
    for (auto& batch : dl) {
      auto group = accelerator.accumulate(m);
      const auto labels = batch.labels.slice(1, 1).flatten();  // each place says the next token
      const int64_t items = (labels != examples::kIgnored).sum().template item<int64_t>();
      const auto logits = m(batch.input_ids).slice(1, 0, -1).flatten(0, 1).to(torch::kFloat);
      const auto loss = torch::nn::functional::cross_entropy(
          logits, labels, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(examples::kIgnored));
      accelerator.backward(loss, items);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(m->parameters(), 1.0);
      opt.step();
      sched.step();
      opt.zero_grad();
      accelerate::report_flops(costs.flops * static_cast<double>(batch.input_ids.numel()));
      tokens += batch.input_ids.numel();
      if (items > 0) sums += torch::stack({loss.detach() * items, torch::full_like(loss.detach(), items)}).to(sums);
      if (!accelerator.sync_gradients()) continue;

      // A step is done.
      ++progress.steps;
      const auto all = accelerator.reduce(sums, "sum");
      progress.loss = (all[0] / all[1]).template item<double>();
      sums.zero_();
      bar.update();
      if (progress.steps % settings.log_every == 0 || progress.steps == total) {
        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - since;
        const double rate = static_cast<double>(tokens) / time.count(), mfu = rate * costs.flops / peak;
        const MemoryLook memory(accelerator);
        char line[200];
        std::snprintf(line, sizeof line,
                      "step %lld loss %.6f, %.0f tokens/s, mfu %.2f, memory %lld MiB, at most %lld MiB",
                      static_cast<long long>(progress.steps), progress.loss, rate * static_cast<double>(ranks), mfu,
                      static_cast<long long>(memory.valley >> 20), static_cast<long long>(memory.peak >> 20));
        accelerator.print(line);
        accelerator.log({{"loss", progress.loss},
                         {"lr", sched.get_last_lr().front()},
                         {"tokens_per_second", rate * static_cast<double>(ranks)},
                         {"mfu", mfu},
                         {"memory_valley", memory.valley},
                         {"memory_peak", memory.peak}},
                        progress.steps);
        since = std::chrono::steady_clock::now(), tokens = 0;
      }
      if (settings.save_every > 0 && progress.steps % settings.save_every == 0)
        accelerator.print("saved", accelerator.save_state().string());
      if (progress.steps == total) break;
    }
  }
  bar.close();

  if (adapter) {
    const auto state = accelerator.get_state_dict(m);
    accelerator.on_main_process([&] { adapter->save(settings.output_dir, state); });
  } else {
    accelerator.save_model(m, settings.output_dir);
    accelerator.on_main_process([&] {
      copy_settings(settings.tokenizer, settings.output_dir);
      copy_settings(settings.model, settings.output_dir);
    });
  }
  accelerator.print(adapter ? "the adapter is in" : "the weights are in", settings.output_dir);

  if (settings.max_new_tokens > 0) {  // all ranks: each may hold a part of the model
    m->eval();
    const auto ids = torch::tensor(tokenizer.encode(settings.prompt)).unsqueeze(0).to(accelerator.device());
    models::GenerationConfig config{.max_new_tokens = settings.max_new_tokens};
    if (const auto end = tokenizer.eos_token_id()) config.eos_token_id = {*end};
    const auto answer = models::generate(m, ids, config).cpu();
    accelerator.print("sample:",
                      tokenizer.decode({answer.data_ptr<int64_t>(), answer.data_ptr<int64_t>() + answer.numel()}));
  }
  accelerator.end_training();
}

/// The same model as one rank of so many, without bytes: what lies on its accelerator at the end of a step (valley) and
/// at most (peak).
void run_dry(const Settings& settings) {
  const auto report = accelerate::dry_run({.num_processes = settings.dry_run}, [&](const accelerate::DryRunMark& mark) {
    auto options = options_of(settings);
    options.gradient_accumulation_plugin.reset();
    accelerate::Accelerator accelerator(options);
    auto model = build(settings);
    auto optimizer = torch::optim::AdamW(model.module()->parameters(), torch::optim::AdamWOptions(settings.lr));
    auto [m, opt] = accelerator.prepare(model, optimizer);
    mark("prepare");
    const auto ids = torch::zeros({settings.batch_size, settings.seq_length},
                                  torch::TensorOptions().dtype(torch::kLong).device(accelerator.device()));
    for (int step = 0; step < 3; ++step) {  // units are known in their order from the second on
      {
        const auto logits = m(ids).slice(1, 0, -1).flatten(0, 1);
        const auto loss = torch::cross_entropy_loss(logits.to(torch::kFloat), ids.slice(1, 1).flatten());
        mark("forward");
        accelerator.backward(loss);
      }
      mark("backward");
      opt.step();
      opt.zero_grad();
      mark("step");
    }
  });
  // An offloaded rank's pieces, their gradients and the optimizer are on the host, and a dry run counts both together.
  const auto on_device = [&](const accelerate::MemoryByUse& memory) {
    return static_cast<double>(memory.total() - (settings.cpu_offload ? memory.model_states() : 0)) / 1e9;
  };
  double peak = 0;
  for (const char* phase : {"forward", "backward", "step"})
    peak = std::max(peak, on_device(report.phase(phase).at_peak));
  const auto& end = report.phase("step").at_end;
  std::printf("%lld processes, each: valley %.1f GB, peak %.1f GB%s\n", static_cast<long long>(settings.dry_run),
              on_device(end), peak, settings.cpu_offload ? " on the accelerator" : "");
  if (settings.cpu_offload) std::printf("and on the host %.1f GB\n", static_cast<double>(end.model_states()) / 1e9);
  for (const char* phase : {"forward", "backward", "step"}) {
    std::printf("%-9s at its peak:", phase);
    for (int use = 0; use < 6; ++use)
      std::printf(" %s %.1f", accelerate::to_string(static_cast<accelerate::MemoryUse>(use)),
                  static_cast<double>(report.phase(phase).at_peak[static_cast<accelerate::MemoryUse>(use)]) / 1e9);
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    const auto settings = read({argc, argv});
    if (settings.dry_run > 0) run_dry(settings);
    else train(settings);
  });
}
