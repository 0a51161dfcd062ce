// Samples and batches with names: structs of your own instead of `batch.data` and `batch.target`.
//   accelerate launch --num_processes 2 build/release/bin/struct_samples
#include <accelerate/accelerate.hpp>

#include <map>

#include "../arguments.hpp"

// A batch. ACCELERATE_FIELDS lists the members that everything walks through: collating, moving to the device,
// splitting over processes, gathering.
struct Batch {
  torch::Tensor signal;              // [B, 64]
  torch::Tensor is_square;           // [B] int64
  std::vector<std::string> station;  // B names; values that are no numbers stay a list
  ACCELERATE_FIELDS(signal, is_square, station)
};

// A sample: the same fields, one of each. Collated names the struct that a list of them becomes, member by
// member in the order of the fields; without it a batch would be a std::tuple. A struct whose members are all tensors
// needs none: its batches are of its own type.
struct Reading {
  torch::Tensor signal;  // [64]
  int64_t is_square = 0;
  std::string station;
  using Collated = Batch;
  ACCELERATE_FIELDS(signal, is_square, station)
};

// Sine and square waves in noise, from three stations.
std::vector<Reading> readings(int64_t count) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
  std::vector<Reading> all;
  for (int64_t i = 0; i < count; ++i) {
    const auto phase = torch::rand({1}, generator) * 6.28;
    auto wave = torch::sin(torch::arange(64) * 0.4 + phase);
    if (i % 2) wave = 0.7 * wave.sign();
    all.push_back({wave + 0.8 * torch::randn({64}, generator), i % 2, std::array{"Oslo", "Lima", "Pune"}[i % 3]});
  }
  return all;
}

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 6);
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  auto network = torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
  auto [model, optimizer, loader] =
      accelerator.prepare(network, torch::optim::AdamW(network->parameters(), 5e-3),
                          accelerate::data::DataLoader(readings(510), {.batch_size = 16, .shuffle = true}));
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (Batch& batch : loader) {
      accelerator.backward(torch::cross_entropy_loss(model(batch.signal), batch.is_square));
      optimizer.step();
      optimizer.zero_grad();
    }

  torch::NoGradGuard no_grad;
  std::map<std::string, std::pair<int64_t, int64_t>> by_station;  // right answers, and all
  for (Batch& batch : loader) {
    const auto right = accelerator.gather_for_metrics(model(batch.signal).argmax(1) == batch.is_square);
    const auto stations = accelerator.gather_for_metrics(batch.station);
    for (size_t i = 0; i < stations.size(); ++i) {
      by_station[stations[i]].first += right[static_cast<int64_t>(i)].item<bool>();
      ++by_station[stations[i]].second;
    }
  }
  for (const auto& [station, counts] : by_station)
    accelerator.print(station, counts.first, "of", counts.second, "right");
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
