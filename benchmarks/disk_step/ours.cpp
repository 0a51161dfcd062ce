/// Steps with the optimizer's states on a disk, and the same bytes read and written by themselves.
/// usage: disk_step memory|nvme|pipelined|raw FOLDER STEPS [ROWS]     ZeRO's stage 3, bf16 with fp32 masters, AdamW of
/// 64 M parameters: 12 bytes a parameter come and go in a step. `memory_backward`, `pipelined_backward`: steps within
/// backward, which ROWS of input make longer.

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <string>

#include "accelerate/accelerator.hpp"
#include "accelerate/parallel/deepspeed_plugin.hpp"
#include "residency/counters.hpp"
#include "residency/disk/disk_memory.hpp"

using namespace accelerate;

namespace {

constexpr int64_t kWidth = 2048, kLayers = 16;

struct WideImpl : torch::nn::Module {
  WideImpl() {
    torch::manual_seed(1);
    for (int64_t i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    const at::NoGradGuard no_grad;
    for (auto& layer : layers)  // as the peer draws them
      layer->weight.copy_(torch::arange(kWidth * kWidth).remainder(251).sub(125).div(125. * 26).view({kWidth, kWidth}));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Wide);

double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void print(const std::string& name, const std::vector<double>& answer, const std::vector<double>& ms, int64_t bytes) {
  std::string text = R"({"contestant": ")" + name + R"(", "bytes": )" + std::to_string(bytes) + R"(, "answer": [)";
  for (size_t i = 0; i < answer.size(); ++i) text += (i ? ", " : "") + std::to_string(answer[i]);
  text += R"(], "ms": [)";
  for (size_t i = 0; i < ms.size(); ++i) text += (i ? ", " : "") + std::to_string(ms[i]);
  std::puts((text + "]}").c_str());
}

/// As large as what a step moves each way, by large requests, reading and writing at the same time.
void raw(const std::string& folder, int64_t steps) {
  const auto disk = std::make_shared<residency::DiskMemory>(
      folder, residency::DiskRequests{.bytes = 8 << 20, .depth = 8},
      residency::SpillFile::Wording{.user = "raw", .contents = "bytes", .advice = ""});
  const int64_t numel = kWidth * kWidth;
  std::vector<at::Tensor> out, in;
  for (int64_t i = 0; i < 3 * kLayers; ++i) {
    in.push_back(torch::ones({numel}));
    disk->take(in.back());
    out.push_back(torch::ones({numel}));
    disk->take(out.back());
  }
  disk->send(in)->wait();
  disk->send(out)->wait();
  disk->bring(out)->wait();
  std::vector<double> ms;
  for (int64_t step = 0; step < steps; ++step) {
    const double begin = now();
    const auto coming = disk->bring(in);
    disk->send(out)->wait();
    coming->wait();
    ms.push_back(now() - begin);
    std::swap(in, out);
  }
  print("raw", {}, ms, 2 * 3 * kLayers * numel * 4);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return std::fputs("usage: disk_step memory|nvme|pipelined|raw FOLDER STEPS [ROWS]\n", stderr), 64;
  const std::string mode = argv[1], folder = argv[2];
  const int64_t steps = std::stoll(argv[3]), rows = argc > 4 ? std::stoll(argv[4]) : 1;
  if (mode == "raw") return raw(folder, steps), 0;
  const std::string more = mode.starts_with("pipelined") ? R"(, "pipeline_read": true, "pipeline_write": true)" : "";
  const std::string offload =
      mode.starts_with("memory")
          ? ""
          : R"(, "offload_optimizer": {"device": "nvme", "nvme_path": ")" + folder + "\"" + more + "}";
  Accelerator accelerator(
      {.cpu = true,
       .deepspeed_plugin = DeepSpeedPlugin{
           .hf_ds_config =
               R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "bf16": {"enabled": true, "check_grad_overflow": false},
                   "zero_force_ds_cpu_optimizer": false, "aio": {"block_size": 8388608, "queue_depth": 8},
                   "zero_optimization": {"stage": 3)" +
               offload + "}}",
           .step_in_backward = mode.ends_with("_backward"),
           .step_at_once = mode.ends_with("_at_once")}});
  Wide model;
  auto [m, optimizer] = accelerator.prepare(model, torch::optim::AdamW(model->parameters(), 1e-4));
  const at::Tensor x = torch::linspace(-1, 1, rows * kWidth).view({rows, kWidth}).to(at::kBFloat16);
  std::vector<double> answer, ms;
  int64_t bytes = 0;
  using residency::ResidencyCount;
  const auto moved = [] {
    return counts::read(ResidencyCount::disk_bytes_read) + counts::read(ResidencyCount::disk_bytes_written);
  };
  for (int64_t step = 0; step < steps; ++step) {
    bytes = moved();
    const double begin = now();
    const auto loss = m(x).to(at::kFloat).square().mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    ms.push_back(now() - begin);
    bytes = moved() - bytes;
    answer.push_back(loss.item<double>());
  }
  print("ours, " + mode, answer, ms, bytes);
}
