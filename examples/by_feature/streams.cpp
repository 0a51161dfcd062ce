// Data that can only be read from the front: a file that is parsed line by line, of a length that nobody knows.
//   accelerate launch --num_processes 2 build/release/bin/streams
#include <accelerate/accelerate.hpp>

#include <filesystem>
#include <fstream>
#include <iomanip>
#include <sstream>

#include "../arguments.hpp"

// A stream has next(), which gives a sample or, at the end, nothing, and reset(), which begins anew. It may also have
// skip(n), for resuming without parsing what was read, and shard(rank, world_size), if it can find its part without
// reading all; without that, each process reads the whole and keeps its rows of every batch.
class MeasurementFile {
 public:
  explicit MeasurementFile(std::filesystem::path path) : path_(std::move(path)) { reset(); }

  std::optional<torch::data::Example<>> next() {
    float x = 0, y = 0;
    char comma = 0;
    if (!(file_ >> x >> comma >> y)) return std::nullopt;
    return torch::data::Example<>(torch::full({1}, x), torch::full({1}, y));
  }
  void reset() { file_ = std::ifstream(path_); }

 private:
  std::filesystem::path path_;
  std::ifstream file_;
};

void train(accelerate_examples::Arguments args) {
  const auto epochs = args.get<int64_t>("--epochs", 3), lines = args.get<int64_t>("--lines", 1003);
  const std::filesystem::path path =
      args.get<std::string>("--file", std::filesystem::temp_directory_path() / "measurements.csv");
  args.check();

  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  accelerator.on_main_process([&] {  // y = 3 x - 1, measured badly
    std::ofstream file(path);
    for (int64_t i = 0; i < lines; ++i) {
      const double x = torch::rand({1}).item<double>() * 4 - 2;
      file << x << "," << 3 * x - 1 + 0.1 * torch::randn({1}).item<double>() << "\n";
    }
  });
  accelerator.wait_for_everyone();

  torch::nn::Linear line(1, 1);
  // One thread reads ahead; the order is the file's, so there is no `shuffle`. By value, shared_ptr or std::ref.
  auto stream = std::make_shared<MeasurementFile>(path);
  auto [model, optimizer, loader] =
      accelerator.prepare(line, torch::optim::SGD(line->parameters(), 0.05),
                          accelerate::data::DataLoader(stream, {.batch_size = 16, .num_workers = 1}));
  int64_t here = 0, everywhere = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch)
    for (auto& batch : loader) {
      accelerator.backward(torch::mse_loss(model(batch.data), batch.target));
      optimizer.step();
      optimizer.zero_grad();
      if (epoch > 0) continue;
      here += batch.data.size(0);
      // All processes make equally many steps: the last batch is completed with samples of the first one, which don't
      // count here.
      everywhere += accelerator.gather_for_metrics(batch.target).size(0);
    }
  std::ostringstream found;
  found << std::fixed << std::setprecision(1) << line->weight.item<double>() << " x + " << line->bias.item<double>();
  accelerator.print("one pass:", everywhere, "lines over", accelerator.num_processes(), "process(es),", here,
                    "rows in this one");
  accelerator.print("found y =", found.str());
  accelerator.on_main_process([&] { std::filesystem::remove(path); });
}

int main(int argc, char** argv) {
  return accelerate::record([&] { train({argc, argv}); });
}
