// How much memory a model takes that is quantized while it is loaded, and writes some tokens then: prints JSON with the
// process' memory, the peak and what is left, before, after loading and after writing.
//
// usage: bench_quantized_memory 8bit|nf4|nf4-nested FOLDER [TOKENS]     FOLDER as make_model.py writes it
#include <accelerate/bigmodel.hpp>
#include <accelerate/bigmodel/quantize.hpp>
#include <accelerate/models/auto_model.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/residency/deferred.hpp>
#include <accelerate/utils/memory.hpp>

#include <torch/torch.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "memory/loading_pages.hpp"

namespace {

using Clock = std::chrono::steady_clock;

/// A line of /proc/self/status, in MB.
double status(const char* key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key)) return std::strtod(line.c_str() + line.find(':') + 1, nullptr) * 1024 / 1e6;
  return 0;
}

double print(const char* when, Clock::time_point since) {
  const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
  std::printf("{\"when\":\"%s\",\"seconds\":%.1f,\"rss_mb\":%.0f,\"of_files_mb\":%.0f,\"peak_mb\":%.0f}\n", when,
              seconds, status("VmRSS:"), status("RssFile:"), status("VmHWM:"));
  std::fflush(stdout);
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::fprintf(stderr, "usage: bench_quantized_memory 8bit|nf4|nf4-nested FOLDER [TOKENS]\n"), 64;
  const std::string kind = argv[1], folder = argv[2];
  accelerate::BnbQuantizationConfig config{.torch_dtype = at::kBFloat16};
  if (kind == "8bit") {
    config.load_in_8bit = true;
  } else {
    config.load_in_4bit = true;
    config.bnb_4bit_quant_type = "nf4";
    config.bnb_4bit_use_double_quant = kind == "nf4-nested";
    config.bnb_4bit_compute_dtype = at::kFloat;
  }
  auto begin = Clock::now();
  at::empty({1});
  print("before", begin);
  begin = Clock::now();
  auto model = [&] {
    const auto empty = accelerate::init_empty_weights();
    return accelerate::models::AutoModelForCausalLM::from_config(folder, accelerate::models::Weights::uninitialized);
  }();
  model.module()->eval();
  const auto weights = accelerate::load_and_quantize_model(model.module(), config, folder, {.strict = false});
  accelerate::return_freed_memory();  // as `accelerate generate` does
  accelerate::give_loading_pages_back();
  print("loaded", begin);
  begin = Clock::now();
  accelerate::models::GenerationConfig generation{.max_new_tokens = argc > 3 ? std::atoi(argv[3]) : 16};
  const auto answer = accelerate::models::generate(model, torch::arange(100, 132).unsqueeze(0), generation);
  print("written", begin);
  std::printf("{\"code_mb\":%.0f,\"tokens\":%ld}\n", static_cast<double>(weights.code_bytes()) / 1e6,
              static_cast<long>(answer.size(1)));
}
