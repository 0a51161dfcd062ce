// The loader alone: 20,000 samples of 64 floats and a label, shuffled, batches of 32, through `prepare`. argv[1]:
// number of workers.
#include <accelerate/accelerate.hpp>

#include <chrono>
#include <iostream>

struct Samples : torch::data::Dataset<Samples> {
  torch::Tensor x = torch::arange(20000 * 64, torch::kFloat).view({20000, 64}), y = torch::arange(20000);
  torch::data::Example<> get(size_t i) override { return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]}; }
  std::optional<size_t> size() const override { return 20000; }
};

int main(int argc, char** argv) {
  accelerate::Accelerator accelerator;
  auto loader = accelerator.prepare(accelerate::data::DataLoader(
      Samples(), {.batch_size = 32, .shuffle = true, .num_workers = argc > 1 ? std::stoll(argv[1]) : 0}));
  std::string times;
  double sum = 0;
  int64_t labels = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    sum = 0, labels = 0;
    for (auto& batch : loader) {
      sum += batch.data[0][0].item<double>() >= 0 ? 1 : 0;  // the batch is really looked at
      labels += batch.target.sum().item<int64_t>();
    }
    times +=
        (pass ? "," : "") +
        std::to_string(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::cout << "{\"contestant\":\"ours\",\"answer\":[" << sum << "," << labels << "],\"ms\":[" << times << "]}"
            << std::endl;
}
