// Loading a language model from a GGUF file, and greedy decoding. usage: bench_generate load|decode|read FILE.gguf
// [TOKENS] load: milliseconds until weights and tokenizer are in memory, as fp32; decode: milliseconds of each new
// token after the first; read: of sums over all weights, which no token can be faster than.
#include <accelerate/models/generate.hpp>
#include <accelerate/models/llama.hpp>
#include <accelerate/models/tokenizer.hpp>

#include <chrono>
#include <cstring>
#include <iostream>

int main(int argc, char** argv) {
  if (argc < 3) return std::cerr << "usage: bench_generate load|decode|read FILE.gguf [TOKENS]\n", 64;
  using Clock = std::chrono::steady_clock;
  using namespace accelerate::models;
  const auto milliseconds = [](Clock::time_point since) {
    return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
  };
  auto begin = Clock::now();
  auto model = LlamaForCausalLM::from_pretrained(argv[2]);
  const auto tokenizer = Tokenizer::from_pretrained(argv[2]);
  std::vector<double> times = {milliseconds(begin)};
  model->eval();
  if (std::strcmp(argv[1], "read") == 0) {
    const torch::InferenceMode inference;
    std::cout << "{\"answer\":[],\"ms\":[";
    for (int pass = 0; pass < 20; ++pass) {
      begin = Clock::now();
      for (const auto& weight : model->parameters()) weight.sum();
      std::cout << (pass ? "," : "") << milliseconds(begin);
    }
    std::cout << "]}" << std::endl;
    return 0;
  }
  const bool decode = std::strcmp(argv[1], "decode") == 0;
  auto config = GenerationConfig::from_pretrained(argv[2]);
  config.max_new_tokens = decode ? (argc > 3 ? std::atoi(argv[3]) : 64) : 2;
  config.eos_token_id.clear();  // the same work for every contestant
  if (decode) times.clear();
  begin = Clock::now();
  const auto ids = generate(model, torch::tensor(tokenizer.encode("Once upon a time")).unsqueeze(0), config,
                            {.on_tokens = [&](const torch::Tensor&) {
                              if (decode) times.push_back(milliseconds(begin));
                              begin = Clock::now();
                              return true;
                            }});
  if (decode) times.erase(times.begin());  // the prompt
  const auto list = [](const auto& values) {
    std::string text;
    for (const auto value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
    return "[" + text + "]";
  };
  std::cout << "{\"contestant\":\"ours\",\"answer\":"
            << list(std::vector<int64_t>(ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + ids.numel()))
            << ",\"ms\":" << list(times) << "}" << std::endl;
}
