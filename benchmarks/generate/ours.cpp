// Loading a language model from a GGUF file, and greedy decoding.
//
// usage: bench_generate TASK FILE.gguf [TOKENS] [--codes]
//   load    milliseconds until weights and tokenizer are there
//   decode  of each new token after the first
//   prefill of a prompt of TOKENS tokens, until the first new one
//   read    of sums over all weights in fp32, which no token of theirs can be faster than
// --codes: the weights stay as they are in the file; otherwise they are decoded to fp32.
#include <accelerate/bigmodel.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/models/llama.hpp>
#include <accelerate/models/tokenizer.hpp>
#include <accelerate/residency/deferred.hpp>
#include <accelerate/utils/memory.hpp>

#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>

#include "memory/loading_pages.hpp"

namespace {

using namespace accelerate::models;
using Clock = std::chrono::steady_clock;

double milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

/// Of all threads: with one of them it says what others on the machine would not let pass by the clock.
double processor_milliseconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

template <class Values> std::string list(const Values& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return "[" + text + "]";
}

/// A line of /proc/self/status, in bytes; 0 elsewhere.
int64_t status(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return 0;
}

struct Loaded {
  LlamaForCausalLM model{nullptr};
  std::optional<accelerate::DispatchedModel> weights;
};

Loaded load(const std::string& path, bool codes) {
  if (!codes) return {LlamaForCausalLM::from_pretrained(path), std::nullopt};
  Loaded loaded;
  {
    const auto empty = accelerate::init_empty_weights();
    loaded.model = LlamaForCausalLM(LlamaConfig::from_pretrained(path), Weights::uninitialized);
  }
  loaded.weights = accelerate::load_checkpoint_and_dispatch(
      loaded.model, path, {.device_map = accelerate::DeviceMap{{"", "cpu"}}, .keep_codes = true, .strict = false});
  return loaded;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return std::cerr << "usage: bench_generate load|decode|prefill|read FILE.gguf [TOKENS] [--codes]\n", 64;
  const std::string task = argv[1], path = argv[2];
  const bool codes = std::strcmp(argv[argc - 1], "--codes") == 0, decode = task == "decode",
             prefill = task == "prefill";
  const int count = argc > 3 && argv[3][0] != '-' ? std::atoi(argv[3]) : 64;
  auto begin = Clock::now();
  double cpu = processor_milliseconds();
  auto [model, weights] = load(path, codes);
  const auto tokenizer = Tokenizer::from_pretrained(path);
  accelerate::return_freed_memory();  // as `accelerate generate` does
  accelerate::give_loading_pages_back();
  std::vector<double> times = {milliseconds(begin)}, cpu_times = {processor_milliseconds() - cpu};
  model->eval();
  if (task == "read") {
    const torch::InferenceMode inference;
    times.clear();
    for (int pass = 0; pass < 20; ++pass) {
      begin = Clock::now();
      for (const auto& weight : model->parameters()) weight.sum();
      times.push_back(milliseconds(begin));
    }
    std::cout << "{\"answer\":[],\"ms\":" << list(times) << "}" << std::endl;
    return 0;
  }
  auto config = GenerationConfig::from_pretrained(path);
  config.max_new_tokens = decode ? count : 2;
  config.eos_token_id.clear();  // the same work for every contestant
  auto ids = tokenizer.encode("Once upon a time");
  if (prefill) {
    // Different lines, so that no contestant finds what it has seen before.
    std::string text;
    for (int i = 0; static_cast<int>(ids.size()) < count; ++i)
      text += "Day " + std::to_string(i) + " was long, and nobody knew what came next. ", ids = tokenizer.encode(text);
    ids.resize(count);
  }
  const int rounds = prefill ? 3 : 1;
  if (decode || prefill) times.clear(), cpu_times.clear();
  torch::Tensor answer;
  for (int round = 0; round < rounds; ++round) {
    begin = Clock::now(), cpu = processor_milliseconds();
    bool first = true;
    answer = generate(model, torch::tensor(ids).unsqueeze(0), config, {.on_tokens = [&](const torch::Tensor&) {
                        if (decode ? !first : prefill && first) {
                          times.push_back(milliseconds(begin));
                          cpu_times.push_back(processor_milliseconds() - cpu);
                        }
                        first = false;
                        begin = Clock::now(), cpu = processor_milliseconds();
                        return true;
                      }});
  }
  std::cout << "{\"contestant\":\"ours\",\"answer\":"
            << list(std::vector<int64_t>(answer.const_data_ptr<int64_t>() + (prefill ? count : 0),
                                         answer.const_data_ptr<int64_t>() + answer.numel()))
            << ",\"ms\":" << list(times) << ",\"cpu_ms\":" << list(cpu_times) << ",\"rss\":" << status("VmRSS")
            << ",\"peak_rss\":" << status("VmHWM") << "}" << std::endl;
}
