// Models that are larger than memory: built without any, and then only this process's shard gets values.
//   build/release/bin/big_init --config examples/configs/llama-3-8b                              # 8 billion
//   parameters, on paper accelerate launch --num_processes 2 build/release/bin/big_init --steps 5                    #
//   and a small one for real
#include <accelerate/accelerate.hpp>
#include <accelerate/models/llama.hpp>

#include <fstream>

#include "../arguments.hpp"

namespace models = accelerate::models;

// The memory that this process has had at most so far, in MiB.
int64_t peak_memory() {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) / 1024;
  return 0;
}

int64_t count(const models::LlamaForCausalLM& model) {
  int64_t sum = 0;
  for (const auto& parameter : model->parameters()) sum += parameter.numel();
  return sum;
}

void run(accelerate_examples::Arguments args) {
  const auto config_dir = args.get<std::string>("--config", "examples/configs/llama-3-8b");
  const auto steps = args.get<int64_t>("--steps", 8);
  args.check();

  // 1. A model of any size is built at once: its parameters have shapes, and a note of how to initialise them, but no
  // bytes.
  accelerate::Accelerator accelerator({.fsdp_plugin = accelerate::FullyShardedDataParallelPlugin{
                                           .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
                                           .transformer_cls_names_to_wrap = {{"LlamaDecoderLayer"}}}});
  {
    const auto before = peak_memory();
    auto empty = accelerate::init_empty_weights();
    const models::LlamaForCausalLM big(models::LlamaConfig::from_pretrained(config_dir));
    accelerator.print("built", count(big), "parameters, eagerly", count(big) * 4 / (1 << 20), "MiB, in",
                      peak_memory() - before, "MiB of memory");
  }

  // 2. The same with a model that this machine can train. prepare() draws the numbers of one parameter at a time, the
  // same as eager construction would have drawn,
  //    and keeps this process's piece.
  models::LlamaConfig config;
  config.vocab_size = 64;
  config.hidden_size = 96;
  config.intermediate_size = 256;
  config.num_hidden_layers = 6;
  config.num_attention_heads = 6;
  accelerate::set_seed(7);
  models::LlamaForCausalLM model = nullptr;
  {
    auto empty = accelerate::init_empty_weights();
    model = models::LlamaForCausalLM(config);
  }
  auto optimizer = torch::optim::AdamW(model->parameters(), torch::optim::AdamWOptions(3e-3));
  auto [m, opt] = accelerator.prepare(model, optimizer);
  int64_t kept = 0;
  for (const auto& group : opt.param_groups())
    for (const auto& piece : group.params()) kept += piece.numel();
  accelerator.print("this process keeps", kept, "of", count(model),
                    "parameters, and as many gradients and twice as many moments");

  // 3. Training as always. The task: say again what was said eight tokens ago. Each process draws numbers of its own
  // from here on, however many of the model's it has drawn.
  accelerate::set_seed(7, {.device_specific = true});
  m->train();
  double first = 0, last = 0;
  for (int64_t step = 0; step < steps; ++step) {
    const auto half = torch::randint(config.vocab_size, {8, 8});
    const auto ids = torch::cat({half, half}, 1).to(accelerator.device());
    const auto logits = m(ids);
    auto loss = torch::cross_entropy_loss(logits.slice(1, 0, -1).flatten(0, 1), ids.slice(1, 1).flatten());
    accelerator.backward(loss);
    accelerator.clip_grad_norm_(m->parameters(), 1.0);
    opt.step();
    opt.zero_grad();
    last = accelerator.reduce(loss.detach(), "mean").item<double>();
    if (step == 0) first = last;
  }
  accelerator.print("loss", first, "->", last, "in", steps, "steps on", accelerator.num_processes(), "process(es)");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { run({argc, argv}); });
}
