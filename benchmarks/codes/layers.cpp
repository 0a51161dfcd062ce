// One linear layer in few bits, as bitsandbytes_peer.py runs it against bitsandbytes: loads the weight and the inputs
// from a file, and writes results there; prints the milliseconds of the best round. Inputs "x.*" go forward, inputs
// "t.*" forward, and the gradients "g.*" back to them.
//
// usage: bench_codes_layers FILE.safetensors OUT.safetensors ROUNDS
#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/formats/safetensors.hpp>

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>

namespace {

/// As Python's process_time with one thread, and the clock with more.
double seconds() {
  if (at::get_num_threads() > 1)
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return std::fprintf(stderr, "usage: bench_codes_layers FILE OUT ROUNDS\n"), 64;
  const auto given = accelerate::load_safetensors(argv[1]);
  const auto& weight = given.at("weight");
  std::map<std::string, at::Tensor> results;
  std::string times;
  for (const std::string kind : {"fp32", "int8", "nf4", "nf4 in bf16"}) {
    torch::nn::Sequential net(torch::nn::Linear(torch::nn::LinearOptions(weight.size(1), weight.size(0)).bias(false)));
    auto& layer_weight = net[0]->as<torch::nn::LinearImpl>()->weight;
    layer_weight.set_data(weight.clone());
    layer_weight.set_requires_grad(false);
    accelerate::BnbQuantizationConfig config;
    config.skip_modules.emplace();
    config.torch_dtype = at::kFloat;
    if (kind == "int8") config.load_in_8bit = true, config.llm_int8_threshold = 0;
    else config.load_in_4bit = true, config.bnb_4bit_quant_type = "nf4";
    config.bnb_4bit_compute_dtype = kind.ends_with("bf16") ? at::kBFloat16 : at::kFloat;
    std::optional<accelerate::DispatchedModel> quantized;
    if (kind != "fp32") quantized = accelerate::load_and_quantize_model(net, config);
    for (const auto& [name, x] : given) {
      const bool trains = name.starts_with("t.");
      if (trains ? kind == "int8" : !name.starts_with("x.") || kind.ends_with("bf16")) continue;
      const torch::AutoGradMode gradients(trains);
      const at::Tensor input = x.clone().set_requires_grad(trains);
      double best = 1e9;
      for (int round = 0; round < std::atoi(argv[3]); ++round) {
        input.mutable_grad() = at::Tensor();
        const double begin = seconds();
        const auto y = net->forward(input);
        if (trains) y.backward(given.at("g" + name.substr(1)));
        best = std::min(best, seconds() - begin);
        results[kind + name.substr(1)] = trains ? input.grad() : y;
      }
      times += (times.empty() ? "" : ",") + ("\"" + kind + name.substr(1) + "\":") + std::to_string(best * 1e3);
    }
  }
  accelerate::save_safetensors(argv[2], results);
  std::printf("{%s}\n", times.c_str());
}
