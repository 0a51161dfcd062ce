// The cost of a step: a schedule records two steps, and prints and writes what they were.
//   accelerate launch --num_processes 2 build/release/bin/profiler --trace_dir traces
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

void train(examples::Arguments args) {
  const auto trace_dir = args.get<std::string>("--trace_dir", "");
  args.check();

  accelerate::ProfileKwargs kwargs{
      .activities = {{"cpu"}},
      .schedule_option = {{{"wait", 1}, {"warmup", 1}, {"active", 2}, {"repeat", 1}}},
      .on_trace_ready =
          [](accelerate::Profile& ready) {
            if (accelerate::PartialState().is_main_process())
              std::cout << ready.key_averages().table({.sort_by = "self_cpu_time_total", .row_limit = 8});
          },
      .with_flops = true};
  if (!trace_dir.empty()) kwargs.output_trace_dir = trace_dir;

  accelerate::Accelerator accelerator({.kwargs_handlers = {kwargs}});
  accelerate::set_seed(0);
  auto network = examples::make_network();
  auto [model, optimizer, loader] =
      accelerator.prepare(network, torch::optim::AdamW(network->parameters(), 0.02),
                          accelerate::data::DataLoader(examples::moons(512), {.batch_size = 32, .shuffle = true}));
  auto profile = accelerator.profile();
  for (auto& batch : loader) {
    accelerator.backward(torch::cross_entropy_loss(model(batch.data), batch.target));
    optimizer.step();
    optimizer.zero_grad();
    profile.step();
  }
  profile.stop();
  accelerator.print("recorded", profile.total_average().count, "calls in 2 of", profile.step_num(), "steps");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
