/// Saves and loads of about `megabytes` of weights and AdamW's states, next to the same bytes written plainly.
///
/// usage: accelerate launch --num_processes 2 bench_checkpoint LAYOUT FOLDER MEGABYTES      LAYOUT: whole, sharded
#include <accelerate/accelerate.hpp>

#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

using namespace accelerate;
namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

namespace {

double ms_since(Clock::time_point begun) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begun).count();
}

/// This rank's bytes in a row, and an fsync: what any save costs at least.
void write_plainly(const fs::path& file, int64_t bytes) {
  static const std::vector<char> block(4 << 20, 'x');
  const int handle = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (int64_t left = bytes; left > 0;) {
    const auto written = ::write(handle, block.data(), static_cast<size_t>(std::min<int64_t>(left, 4 << 20)));
    if (written < 0) std::abort();
    left -= written;
  }
  if (::fsync(handle) != 0) std::abort();
  ::close(handle);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const bool sharded = std::string(argv[1]) == "sharded";
  const fs::path folder = argv[2];
  constexpr int64_t kWidth = 1024, kStates = 3;
  const int64_t layers = std::max<int64_t>(1, std::stoll(argv[3]) * 1'000'000 / (kStates * 4 * kWidth * kWidth));
  AcceleratorOptions options{.cpu = true};
  if (sharded)
    options.fsdp_plugin = FullyShardedDataParallelPlugin{.state_dict_type = StateDictType::sharded_state_dict};
  Accelerator accelerator(options);
  torch::manual_seed(1);
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i)
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  torch::optim::AdamW bare(net->parameters(), 1e-4);
  auto [model, optimizer] = accelerator.prepare(net, bare);
  const auto input = torch::rand({8, kWidth});
  const auto step = [&, &model = model, &optimizer = optimizer] {
    const auto begun = Clock::now();
    accelerator.backward(model(input).pow(2).mean());
    optimizer.step(), optimizer.zero_grad();
    accelerator.wait_for_everyone();
    return ms_since(begun);
  };
  const auto timed = [&](auto&& f) {
    accelerator.wait_for_everyone();
    const auto begun = Clock::now();
    f();
    accelerator.wait_for_everyone();
    return ms_since(begun);
  };
  step(), step();
  const int64_t all = layers * kStates * 4 * kWidth * kWidth, mine = sharded ? all / accelerator.num_processes()
                                                                     : accelerator.is_main_process() ? all
                                                                                                     : 0;
  const auto raw = timed([&] {
    if (mine > 0) write_plainly(folder / ("raw_" + std::to_string(accelerator.process_index())), mine);
  });
  const auto save = timed([&] { accelerator.save_state(folder / "save"); });
  const auto load = timed([&] { accelerator.load_state(folder / "save"); });
  const auto again = timed([&] { accelerator.load_state(folder / "save"); });
  constexpr int kSteps = 8;
  double plain = 0, beside = 0;
  for (int i = 0; i < kSteps; ++i) plain += step();
  const auto begun = Clock::now();
  accelerator.save_state(folder / "behind", {.behind_training = true});
  const auto call = ms_since(begun);
  for (int i = 0; i < kSteps; ++i) beside += step();
  const auto rest = timed([&] { accelerator.wait_for_checkpoint(); });
  const double sum = accelerator.reduce(net->parameters()[0].sum()).item<double>();
  if (accelerator.is_main_process())
    std::printf(
        R"({"bytes": %lld, "raw": %.1f, "save": %.1f, "load": %.1f, "again": %.1f, "call": %.2f, "extra": %.1f, "rest": %.1f, "answer": %.4f})"
        "\n",
        static_cast<long long>(all), raw, save, load, again, call, beside - plain, rest, sum);
}
