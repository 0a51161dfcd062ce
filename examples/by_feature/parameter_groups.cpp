// Parameter groups: weight decay for matrices only, and a smaller learning rate for the part that is trained already.
//   accelerate launch --num_processes 2 build/release/bin/parameter_groups
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"

struct ClassifierImpl : torch::nn::Module {
  torch::nn::Sequential backbone = register_module(
      "backbone", torch::nn::Sequential(torch::nn::Linear(16, 64),
                                        torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})), torch::nn::ReLU()));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(64, 2));
  torch::Tensor forward(const torch::Tensor& x) { return head(backbone->forward(x)); }
};
TORCH_MODULE(Classifier);

struct Noise : torch::data::Dataset<Noise> {
  torch::Tensor x = torch::randn({512, 16}), y = (x.sum(1) > 0).to(torch::kLong);
  torch::data::Example<> get(size_t i) override { return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]}; }
  std::optional<size_t> size() const override { return 512; }
};

// Four groups: {backbone, head} x {decays, does not}. Biases and the scales of norms, all of one dimension, don't
// decay.
std::vector<torch::optim::OptimizerParamGroup> groups_of(const Classifier& classifier, double rate, double decay) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const bool in_head : {false, true})
    for (const bool decays : {false, true}) {
      std::vector<torch::Tensor> members;
      for (const auto& item : classifier->named_parameters())
        if (item.key().starts_with("head.") == in_head && (item.value().dim() > 1) == decays)
          members.push_back(item.value());
      groups.emplace_back(members,
                          std::make_unique<torch::optim::AdamWOptions>(
                              torch::optim::AdamWOptions(in_head ? rate : rate / 10).weight_decay(decays ? decay : 0)));
    }
  return groups;
}

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 6);
  const auto rate = args.get<double>("--lr", 0.01);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  Classifier classifier;
  auto optimizer = torch::optim::AdamW(groups_of(classifier, rate, 0.1));
  auto loader = accelerate::data::DataLoader(Noise(), {.batch_size = 16, .shuffle = true});
  // One factor for all groups, so the backbone's rate stays a tenth of the head's. Half of the schedule is trained
  // here.
  auto scheduler = accelerate::optim::linear_schedule_with_warmup(optimizer, 10, 2 * epochs * loader.size());
  auto [model, opt, dl, sched] = accelerator.prepare(classifier, optimizer, loader, scheduler);
  double first = 0, last = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : dl) {
      const auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
      accelerator.backward(loss);
      opt.step();
      sched.step();
      opt.zero_grad();
      last = accelerator.reduce(loss.detach(), "mean").item<double>();
      if (first == 0) first = last;
    }
  for (size_t i = 0; i < opt.param_groups().size(); ++i) {
    const auto& group = opt.param_groups()[i];
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    accelerator.print(i < 2 ? "backbone:" : "head:", group.params().size(), "tensors at rate", options.lr(),
                      "with decay", options.weight_decay());
  }
  accelerator.print("loss", first, "->", last);
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
