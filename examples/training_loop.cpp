// The smallest complete program: the training loop of the README, on made-up data.
//   accelerate launch --num_processes 2 build/release/bin/training_loop
#include <accelerate/accelerate.hpp>

namespace {

struct Noise : torch::data::Dataset<Noise> {
  torch::Tensor x = torch::randn({512, 20}), y = (x.sum(1) > 0).to(torch::kLong);
  torch::data::Example<> get(size_t i) override { return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]}; }
  std::optional<size_t> size() const override { return 512; }
};

}  // namespace

int main() {
  accelerate::Accelerator accelerator({.gradient_accumulation_steps = 2});
  accelerate::set_seed(0);
  auto model = torch::nn::Sequential(torch::nn::Linear(20, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
  auto optimizer = torch::optim::AdamW(model->parameters(), 5e-3);
  auto loader = accelerate::data::DataLoader(Noise(), {.batch_size = 16, .shuffle = true});
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, 10, 8 * loader.size());
  auto [m, opt, dl, sched] = accelerator.prepare(model, optimizer, loader, scheduler);

  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    for (auto& batch : dl) {
      auto step = accelerator.accumulate(m);
      auto loss = torch::cross_entropy_loss(m(batch.data), batch.target);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(m->parameters(), 1.0);
      opt.step();
      sched.step();
      opt.zero_grad();
    }
  }
  int64_t correct = 0, seen = 0;
  torch::NoGradGuard no_grad;
  for (auto& batch : dl) {
    auto [predicted, target] = accelerator.gather_for_metrics(std::make_tuple(m(batch.data).argmax(1), batch.target));
    correct += (predicted == target).sum().item<int64_t>();
    seen += target.size(0);
  }
  accelerator.print("accuracy", static_cast<double>(correct) / static_cast<double>(seen), "on", seen, "samples");
}
