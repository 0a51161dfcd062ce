// A collate function of one's own: mixup, which makes each training batch of blends of two samples.
//   accelerate launch --num_processes 2 build/release/bin/collate
#include <accelerate/accelerate.hpp>

#include "../arguments.hpp"
#include "moons.hpp"

namespace examples = accelerate_examples;

struct Blend {
  torch::Tensor points;  // [B, 2]
  torch::Tensor shares;  // [B, 2]: how much of each class
  ACCELERATE_FIELDS(points, shares)
};

// Any callable that takes a list of samples. Its return type is the loader's batch type; rows are counted by its
// tensors' first dimension. With num_workers it is copied into the loader and called by several threads at once, so it
// keeps no state that changes. Its random numbers come from a generator that begins with the batch: LibTorch's default
// one is locked, but which thread draws first would be another one in each run.
Blend mixup(std::vector<examples::Point> samples) {
  const auto batch = accelerate::data::default_collate(std::move(samples));  // the usual stacking first
  const auto classes = torch::one_hot(batch.target, 2).to(torch::kFloat);
  const auto seed = static_cast<uint64_t>(1e6 * batch.data.abs().sum().item<double>());
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto partner = torch::randperm(batch.data.size(0), generator);
  const auto share =
      1 - 0.3 * torch::rand({batch.data.size(0), 1}, generator);  // of the sample itself, the rest its partner's
  return {share * batch.data + (1 - share) * batch.data.index_select(0, partner),
          share * classes + (1 - share) * classes.index_select(0, partner)};
}

void train(examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 10);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = examples::make_network();
  // One data set, two collate functions: blends for training, plain batches for looking at the result.
  auto [model, optimizer, blends, plain] = accelerator.prepare(
      network, torch::optim::AdamW(network->parameters(), 0.02),
      accelerate::data::DataLoader(examples::moons(512), {.batch_size = 16, .shuffle = true, .num_workers = 2}, mixup),
      accelerate::data::DataLoader(examples::moons(512), {.batch_size = 64}));
  double mixed = 0;
  int64_t rows = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (Blend& batch : blends) {
      accelerator.backward(torch::cross_entropy_loss(model(batch.points), batch.shares));  // shares as soft labels
      optimizer.step();
      optimizer.zero_grad();
      mixed += (batch.shares.amax(1) < 1).sum().item<double>();
      rows += batch.shares.size(0);
    }

  torch::NoGradGuard no_grad;
  int64_t correct = 0, seen = 0;
  for (auto& batch : plain) {
    const auto right = accelerator.gather_for_metrics(model(batch.data).argmax(1) == batch.target);
    correct += right.sum().item<int64_t>();
    seen += right.size(0);
  }
  accelerator.print("trained on", rows, "rows per process, of them", static_cast<int64_t>(100 * mixed / rows),
                    "% blends of both classes");
  accelerator.print("accuracy", static_cast<double>(correct) / static_cast<double>(seen), "on", seen, "unmixed points");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
