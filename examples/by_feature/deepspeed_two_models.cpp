// Two models by DeepSpeed configurations of their own: a small student learns what a large teacher says, which is only
// asked, its parameters split over the processes.
//   accelerate launch --num_processes 2 build/release/bin/deepspeed_two_models
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

torch::nn::Sequential make_network(int64_t width) {
  return torch::nn::Sequential(torch::nn::Linear(2, width), torch::nn::Tanh(), torch::nn::Linear(width, width),
                               torch::nn::Tanh(), torch::nn::Linear(width, 2));
}

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10);
  args.check();

  const accelerate::DeepSpeedPlugin for_student{.hf_ds_config = R"({
    "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}
  })"};
  const accelerate::DeepSpeedPlugin for_teacher{.hf_ds_config = R"({
    "train_micro_batch_size_per_gpu": 16, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
  })"};
  accelerate::Accelerator accelerator({.deepspeed_plugins = {{"student", for_student}, {"teacher", for_teacher}}});
  accelerate::set_seed(0);
  auto large = make_network(128), small = make_network(8);

  // The teacher learns first, by its own settings, which make an Accelerator of their own.
  accelerator.state().select_deepspeed_plugin("teacher");
  accelerate::Accelerator of_teacher;
  auto [teacher, teacher_optimizer, loader] = of_teacher.prepare(
      large, torch::optim::AdamW(large->parameters(), 0.01),
      accelerate::data::DataLoader(accelerate_examples::moons(256), {.batch_size = 16, .shuffle = true}));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      of_teacher.backward(torch::cross_entropy_loss(teacher(batch.data), batch.target));
      teacher_optimizer.step();
      teacher_optimizer.zero_grad();
    }

  accelerator.state().select_deepspeed_plugin("student");
  auto [student, optimizer] = accelerator.prepare(small, torch::optim::AdamW(small->parameters(), 0.01));
  torch::Tensor distance;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      const auto told = [&] {
        const torch::NoGradGuard only_asked;
        return teacher(batch.data).log_softmax(-1);
      }();
      const auto loss = torch::kl_div(student(batch.data).log_softmax(-1), told, at::Reduction::Mean, true);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      distance = loss.detach();
    }
  accelerator.print("student and teacher differ by", accelerator.reduce(distance, "mean").item<double>());
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
