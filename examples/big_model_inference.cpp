// A model larger than the memory that it may use.
//
// Once, weights to try it with (random, in half precision, a LLaMA of the given size):
//     big_model_inference --model big --write_random 12GB
// Then, within 2 GB that the kernel enforces (RLIMIT_DATA; in a control group: systemd-run --scope -p MemoryMax=2G
// big_model_inference ...):
//     big_model_inference --model big --dtype float16 --max_memory 1.2GB --limit 2GB
// The same numbers, if there is memory for it, come from the mapped files:
//     big_model_inference --model big --dtype float16
// --model is any folder of a LLaMA-like model (config.json and safetensors), or a .gguf file; a GGUF file's codes
// become fp32 when they are fetched.
#include <sys/resource.h>
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel.hpp>
#include <accelerate/models/llama.hpp>
#include <accelerate/residency.hpp>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "arguments.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::models::LlamaConfig;
using accelerate::models::LlamaForCausalLM;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// kB from /proc/self/status.
int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  return 0;
}

int64_t bytes_of(const std::string& text) { return static_cast<int64_t>(accelerate::convert_file_size_to_int(text)); }

LlamaForCausalLM without_memory(const LlamaConfig& config) {
  LlamaForCausalLM model = nullptr;
  {
    const auto empty = accelerate::init_empty_weights();
    model = LlamaForCausalLM(config, accelerate::models::Weights::uninitialized);
  }
  model->eval();
  return model;
}

/// Shards of about 1 GB: slices of one block of random numbers, so that writing costs the disk's time and not the
/// generator's.
void write_random(const fs::path& folder, int64_t bytes) {
  LlamaConfig config;
  config.vocab_size = 32000, config.hidden_size = 4096, config.intermediate_size = 11008,
  config.num_attention_heads = 32;
  if (bytes < int64_t{4} << 30)
    config.hidden_size = 1024, config.intermediate_size = 2816, config.num_attention_heads = 16;
  const int64_t h = config.hidden_size, layer = 2 * (4 * h * h + 3 * h * config.intermediate_size + 2 * h);
  config.num_hidden_layers = std::max<int64_t>(1, (bytes - 4 * config.vocab_size * h) / layer);
  fs::create_directories(folder);
  std::ofstream(folder / "config.json")
      << "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": " << config.vocab_size
      << ", \"hidden_size\": " << h << ", \"intermediate_size\": " << config.intermediate_size
      << ", \"num_hidden_layers\": " << config.num_hidden_layers
      << ", \"num_attention_heads\": " << config.num_attention_heads << ", \"torch_dtype\": \"float16\"}\n";
  const auto model = without_memory(config);
  torch::manual_seed(0);
  constexpr int64_t kBlock = 1 << 26;
  const auto block = torch::randn({kBlock}).mul_(0.02).to(torch::kHalf);
  std::map<std::string, at::Tensor> shard;
  std::map<std::string, std::string> where;
  int64_t in_shard = 0, number = 0, total = 0;
  const auto write = [&] {
    const std::string name = "model-" + std::to_string(++number) + ".safetensors";
    for (const auto& [key, value] : shard) where[key] = name;
    accelerate::save_safetensors(folder / name, shard, {{"format", "pt"}});
    std::cout << "  " << name << std::endl;
    shard.clear(), in_shard = 0;
  };
  for (const auto& item : model->named_parameters()) {
    const auto& parameter = item.value();
    const int64_t numel = parameter.numel(), offset = total * 7919 % (kBlock / 2);
    auto value = torch::empty({numel}, torch::kHalf);
    if (parameter.dim() == 1) value.fill_(1);
    else
      for (int64_t at = 0; at < numel; at += kBlock / 2)
        value.narrow(0, at, std::min(kBlock / 2, numel - at))
            .copy_(block.narrow(0, (offset + at / 3) % (kBlock / 2), std::min(kBlock / 2, numel - at)));
    total += numel;
    shard[item.key()] = value.view(parameter.sizes());
    in_shard += numel * 2;
    if (in_shard > 1'000'000'000) write();
  }
  if (!shard.empty()) write();
  std::ofstream index(folder / "model.safetensors.index.json");
  index << "{\"metadata\": {\"total_size\": " << 2 * total << "}, \"weight_map\": {";
  for (const char* comma = ""; const auto& [key, file] : where)
    index << std::exchange(comma, ", ") << '"' << key << "\": \"" << file << '"';
  index << "}}\n";
  std::cout << "wrote " << 2 * total << " bytes in " << number << " files, " << config.num_hidden_layers << " layers"
            << std::endl;
}

/// FNV-1a over the bits of a tensor.
uint64_t bits_of(const at::Tensor& tensor, uint64_t hash) {
  const auto bytes = tensor.contiguous();
  const auto* at = static_cast<const unsigned char*>(bytes.const_data_ptr());
  for (size_t i = 0; i < bytes.nbytes(); ++i) hash = (hash ^ at[i]) * 1099511628211ULL;
  return hash;
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    accelerate_examples::Arguments args(argc, argv);
    const fs::path folder = args.get("--model", "");
    const auto random = args.get("--write_random", "");
    const auto device_map = args.get("--device_map", "auto");
    const auto max_memory = args.get("--max_memory", "");
    const auto limit = args.get("--limit", "");
    const auto prompt = args.get("--prompt_ids", "1,2,3");
    const auto dtype = args.get("--dtype", "float32");
    const auto tokens = args.get("--tokens", int64_t{4});
    args.check();
    if (folder.empty())
      throw accelerate::ConfigError(
          "big_model_inference: --model is missing, a folder with config.json and safetensors, or a .gguf file");
    if (!random.empty()) return write_random(folder, bytes_of(random));
    if (!limit.empty()) {
      const auto bytes = static_cast<rlim_t>(bytes_of(limit));
      const rlimit data{bytes, bytes};
      if (::setrlimit(RLIMIT_DATA, &data) != 0)
        throw accelerate::ResourceError("big_model_inference: can't limit memory to " + limit);
    }
    const auto begin = std::chrono::steady_clock::now();
    const auto config = LlamaConfig::from_pretrained(folder);
    auto net = without_memory(config);
    accelerate::LoadAndDispatchOptions options;
    if (dtype == "float16") options.dtype = torch::kHalf;
    else if (dtype == "bfloat16") options.dtype = torch::kBFloat16;
    else if (dtype != "float32")
      throw accelerate::ConfigError("big_model_inference: found --dtype " + dtype +
                                    ", expected float32, float16 or bfloat16");
    // By strategy the host's entry limits all weights there; without one a model that does not fit is read within half
    // of what is free.
    if (device_map == "auto" || device_map == "sequential" || device_map == "balanced" ||
        device_map == "balanced_low_0")
      options.device_map = device_map;
    else options.device_map = accelerate::DeviceMap{{"", accelerate::Place(device_map)}};
    if (!max_memory.empty()) {
      if (std::holds_alternative<std::string>(*options.device_map))
        options.max_memory = accelerate::MaxMemory{{"cpu", max_memory}};
      else options.offload.budget_bytes = bytes_of(max_memory);
    }
    const auto model = accelerate::load_checkpoint_and_dispatch(net, folder, options);
    std::cout << "loaded in " << seconds_since(begin) << " s; " << model.streamed_bytes() << " bytes in "
              << model.units() << " units are read when they are used" << std::endl;

    const torch::InferenceMode inference;
    std::vector<int64_t> ids;
    std::stringstream list(prompt);
    for (std::string id; std::getline(list, id, ',');) ids.push_back(std::stoll(id));
    uint64_t hash = 1469598103934665603ULL;
    for (int64_t i = 0; i < tokens; ++i) {
      accelerate::residency::reset_stats();
      const auto start = std::chrono::steady_clock::now();
      const auto logits = model(torch::tensor(ids).unsqueeze(0)).select(1, -1);
      const double seconds = seconds_since(start);
      ids.push_back(logits.argmax(-1).item<int64_t>());
      hash = bits_of(logits, hash);
      const auto stats = accelerate::residency::stats();
      std::cout << "token " << ids.back() << ": " << seconds << " s, " << 1 / seconds << " tokens/s, read "
                << static_cast<double>(stats.bytes_fetched) / 1e9 << " GB at "
                << static_cast<double>(stats.bytes_fetched) / 1e9 / seconds << " GB/s, weights in memory at most "
                << static_cast<double>(stats.peak_resident_bytes) / 1e9 << " GB" << std::endl;
    }
    std::cout << "bits of all logits " << std::hex << hash << std::dec << "; resident memory at most "
              << static_cast<double>(status_bytes("VmHWM")) / 1e9 << " GB, private "
              << static_cast<double>(status_bytes("VmData")) / 1e9 << " GB now" << std::endl;
  });
}
