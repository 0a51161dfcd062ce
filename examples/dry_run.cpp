// What would training this model on that many processes take? Runs the training loop dry, as one rank of each number of
// processes, on one processor and in seconds.
//   build/release/bin/dry_run --config examples/configs/llama-3-8b --num_processes 8,64,1024
//   build/release/bin/dry_run --config examples/configs/llama-3-70b --num_processes 1024 --mixed_precision bf16 --json
#include <accelerate/accelerate.hpp>
#include <accelerate/models/llama.hpp>

#include <cstdio>
#include <iostream>
#include <sstream>

#include "arguments.hpp"

namespace models = accelerate::models;
using accelerate::MemoryUse;

struct Settings {
  std::string config, strategy, precision;
  int64_t batch_size, sequence_length, process_index;
};

struct Outcome {
  accelerate::DryRunReport report;
  accelerate::ZeroShape shape;
  accelerate::ZeroEstimate formula;
};

Outcome run(const Settings& settings, int64_t num_processes) {
  Outcome outcome;
  const accelerate::FullyShardedDataParallelPlugin plugin{
      .fsdp_version = 1,
      .sharding_strategy = accelerate::parse_sharding_strategy(settings.strategy),
      .backward_prefetch = accelerate::BackwardPrefetch::backward_pre,
      .auto_wrap_policy = accelerate::AutoWrapPolicy::transformer_based_wrap,
      .transformer_cls_names_to_wrap = {{"LlamaDecoderLayer"}}};
  outcome.report = accelerate::dry_run(
      {.num_processes = num_processes, .process_index = settings.process_index},
      [&](const accelerate::DryRunMark& mark) {
        // From here on it is any training program.
        accelerate::Accelerator accelerator({.mixed_precision = settings.precision, .fsdp_plugin = plugin});
        models::LlamaForCausalLM model = nullptr;
        {
          auto empty = accelerate::init_empty_weights();
          model = models::LlamaForCausalLM(models::LlamaConfig::from_pretrained(settings.config));
        }
        auto with_precision = plugin;
        if (settings.precision != "no")
          with_precision.mixed_precision_policy = accelerate::MixedPrecision{.preset = settings.precision};
        outcome.shape = accelerate::zero_shape(model, with_precision, num_processes);
        torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-4));
        auto [m, opt] = accelerator.prepare(model, optimizer);
        mark("prepare");
        const auto ids = torch::zeros({settings.batch_size, settings.sequence_length},
                                      torch::TensorOptions().dtype(torch::kLong).device(accelerator.device()));
        for (int step = 0; step < 3; ++step) {  // the engine learns the order of units in the first
          {
            const auto logits = m(ids);
            auto loss = torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::kFloat), ids.flatten());
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
  outcome.formula = accelerate::zero_estimate(*plugin.sharding_strategy, outcome.shape);
  return outcome;
}

const char* const kPhases[] = {"prepare", "forward", "backward", "step"};

int64_t volume_of_step(const accelerate::DryRunReport& report) {
  int64_t sum = 0;
  for (const char* phase : {"forward", "backward", "step"}) sum += report.phase(phase).traffic.volume();
  return sum;
}

int64_t sent_in_step(const accelerate::DryRunReport& report) {
  int64_t sum = 0;
  for (const char* phase : {"forward", "backward", "step"}) sum += report.phase(phase).traffic.sent;
  return sum;
}

void print_table(const Outcome& outcome) {
  const auto gib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); };
  const auto& report = outcome.report;
  std::printf("%lld processes, %.2f G parameters; GiB on one of them\n", static_cast<long long>(report.num_processes),
              static_cast<double>(outcome.shape.parameters) / 1e9);
  std::printf("  %-10s %10s   when it is highest:", "", "peak");
  for (int use = 0; use < 6; ++use) std::printf(" %10s", accelerate::to_string(static_cast<MemoryUse>(use)));
  std::printf("\n");
  for (const char* name : kPhases) {
    const auto& phase = report.phase(name);
    std::printf("  %-10s %10.3f                      ", name, gib(phase.at_peak.total()));
    for (int use = 0; use < 6; ++use) std::printf(" %10.3f", gib(phase.at_peak[static_cast<MemoryUse>(use)]));
    std::printf("\n");
  }
  const auto& formula = outcome.formula;
  const auto compare = [&](const char* what, int64_t found, int64_t expected) {
    std::printf("  %-44s %12.3f, formula %12.3f (%+.2f %%)\n", what, gib(found), gib(expected),
                expected ? 100.0 * (static_cast<double>(found) / static_cast<double>(expected) - 1) : 0.0);
  };
  compare("model states after the step", report.phase("step").at_end.model_states(), formula.model_states);
  compare("messages of one step", volume_of_step(report), formula.volume - formula.volume_saved);
  if (formula.volume_saved)
    std::printf(
        "    the paper's formula is %.3f; %.3f are saved, because backward finds the last unit and the root still "
        "present\n",
        gib(formula.volume), gib(formula.volume_saved));
  std::printf("  %-44s %12.3f\n\n", "leave this process around a ring", gib(sent_in_step(report)));
}

void print_json(const Outcome& outcome, bool first) {
  std::ostringstream out;
  const auto& report = outcome.report;
  out << (first ? "[\n" : ",\n") << "  {\"num_processes\": " << report.num_processes
      << ", \"process_index\": " << report.process_index << ", \"parameters\": " << outcome.shape.parameters
      << ", \"phases\": {";
  for (const char* name : kPhases) {
    const auto& phase = report.phase(name);
    out << (name == kPhases[0] ? "" : ", ") << "\"" << name << "\": {\"peak_bytes\": " << phase.at_peak.total()
        << ", \"bytes_at_end\": " << phase.at_end.total();
    for (int use = 0; use < 6; ++use)
      out << ", \"" << accelerate::to_string(static_cast<MemoryUse>(use))
          << "\": " << phase.at_peak[static_cast<MemoryUse>(use)];
    out << ", \"volume_bytes\": " << phase.traffic.volume() << ", \"sent_bytes\": " << phase.traffic.sent << "}";
  }
  const auto& formula = outcome.formula;
  out << "}, \"model_state_bytes\": " << report.phase("step").at_end.model_states()
      << ", \"volume_bytes\": " << volume_of_step(report) << ", \"sent_bytes\": " << sent_in_step(report)
      << ", \"formula\": {\"model_state_bytes\": " << formula.model_states
      << ", \"gathered_bytes\": " << formula.gathered << ", \"volume_bytes\": " << formula.volume
      << ", \"volume_saved_bytes\": " << formula.volume_saved << "}}";
  std::cout << out.str();
}

int main(int argc, char** argv) {
  return accelerate::record([&] {
    accelerate_examples::Arguments args(argc, argv);
    const Settings settings{.config = args.get<std::string>("--config", "examples/configs/llama-3-8b"),
                            .strategy = args.get<std::string>("--strategy", "FULL_SHARD"),
                            .precision = args.get<std::string>("--mixed_precision", "no"),
                            .batch_size = args.get<int64_t>("--batch_size", 1),
                            .sequence_length = args.get<int64_t>("--sequence_length", 1),
                            .process_index = args.get<int64_t>("--process_index", 0)};
    std::istringstream list(args.get<std::string>("--num_processes", "8,64,1024"));
    const bool json = args.flag("--json");
    args.check();
    bool first = true;
    for (std::string count; std::getline(list, count, ','); first = false) {
      const auto outcome = run(settings, std::stoll(count));
      if (json) print_json(outcome, first);
      else print_table(outcome);
    }
    if (json) std::cout << "\n]\n";
  });
}
