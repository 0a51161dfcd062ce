// A model within a limit of the kernel's that the model in memory can't meet. Own processes, because limits can't be
// taken back.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "accelerate/bigmodel.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/memory.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;

constexpr int64_t kTowerWidth = 2048, kTowerLayers = 18;
constexpr int64_t kModelBytes = kTowerLayers * kTowerWidth * kTowerWidth * 4;  // 302 MB
/// On top of what the process has when it begins to load: far less than the model, enough for the budget, stacks and
/// buffers of the reading threads, and LibTorch's scratch memory.
constexpr int64_t kLimitBytes = 160'000'000, kBudgetBytes = 68'000'000;

struct TowerImpl : torch::nn::Module {
  TowerImpl() {
    for (int64_t i = 0; i < kTowerLayers; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(kTowerWidth, kTowerWidth).bias(false))));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Tower);

fs::path model_file() { return fs::path(support::scratch_dir()) / "limit.safetensors"; }
fs::path answer_file() { return fs::path(support::scratch_dir()) / "limit.answer"; }
at::Tensor input() { return torch::linspace(-1, 1, kTowerWidth).view({1, kTowerWidth}); }

void write_model() {
  if (fs::exists(answer_file())) return;  // the processes below come by here again
  at::set_num_threads(1);                 // as they: the order of sums depends on it
  torch::manual_seed(0);
  std::map<std::string, at::Tensor> tensors;
  for (int64_t i = 0; i < kTowerLayers; ++i)
    tensors["layer" + std::to_string(i) + ".weight"] = torch::empty({kTowerWidth, kTowerWidth}).uniform_(-0.05, 0.05);
  accelerate::save_safetensors(model_file(), tensors);
  const torch::NoGradGuard no_grad;
  at::Tensor x = input();
  for (int64_t i = 0; i < kTowerLayers; ++i)
    x = torch::tanh(x.matmul(tensors["layer" + std::to_string(i) + ".weight"].t()));
  std::ofstream(answer_file(), std::ios::binary)
      .write(static_cast<const char*>(x.const_data_ptr()), static_cast<std::streamsize>(x.nbytes()));
}

Tower without_memory() {
  const auto empty = accelerate::init_empty_weights();
  return Tower();
}

/// Limits the memory that the process may have more than now.
void limit_memory() {
  std::ifstream status("/proc/self/status");
  int64_t used = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmData:")) used = std::stoll(line.substr(7)) * 1024;
  const rlimit data{static_cast<rlim_t>(used + kLimitBytes), static_cast<rlim_t>(used + kLimitBytes)};
  if (used == 0 || ::setrlimit(RLIMIT_DATA, &data) != 0) std::_Exit(9);
}

bool right(const at::Tensor& out) {
  std::ifstream in(answer_file(), std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  const auto values = out.contiguous();
  return bytes.size() == values.nbytes() && std::memcmp(bytes.data(), values.const_data_ptr(), bytes.size()) == 0;
}

[[noreturn]] void run_within_limit(const accelerate::LoadAndDispatchOptions& options) {
  at::set_num_threads(1);
  auto net = without_memory();
  const torch::NoGradGuard no_grad;
  input().matmul(torch::ones({kTowerWidth, 8}));  // what LibTorch sets up with its first product is not the model's
  limit_memory();
  try {
    const auto model = accelerate::load_checkpoint_and_dispatch(net, model_file(), options);
    for (int i = 0; i < 2; ++i)
      if (!right(model(input()))) std::_Exit(1);
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    std::_Exit(accelerate::should_reduce_batch_size(error) || std::strstr(error.what(), "annot allocate memory") ? 3
                                                                                                                 : 4);
  }
  std::_Exit(0);
}

class LimitDeathTest : public testing::Test {
 protected:
  LimitDeathTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    ::setenv("ACCELERATE_TEST_DIR", support::scratch_dir().c_str(), 1);  // the processes below find the model in it
    write_model();
  }
};

TEST_F(LimitDeathTest, AModelComputesToTheBitWithinHalfOfItsSize) {
  static_assert(2 * kLimitBytes < kModelBytes + (20 << 20));
  EXPECT_EXIT(
      run_within_limit({.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = kBudgetBytes}}),
      testing::ExitedWithCode(0), "");
}

TEST_F(LimitDeathTest, InMemoryItDoesNotFit) {
  EXPECT_EXIT(run_within_limit({.device_map = accelerate::DeviceMap{{"", "cpu"}}}), testing::ExitedWithCode(3), "");
}

}  // namespace
