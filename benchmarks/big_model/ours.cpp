// Tokens of a model of 492 M parameters whose weights are elsewhere. usage: ours WAY FOLDER TOKENS [cold]
// WAY: memory, cpu_offload, disk_offload, load (load_checkpoint_and_dispatch with everything on disk), read (the same,
// but never mapped).
#include <fcntl.h>
#include <unistd.h>
#include <accelerate/accelerate.hpp>
#include <accelerate/bigmodel.hpp>
#include <accelerate/models/llama.hpp>

#include <chrono>
#include <filesystem>
#include <iostream>

namespace {

namespace fs = std::filesystem;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// The system forgets the files' pages that nobody has mapped.
void forget(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int file = ::open(entry.path().c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    ::fsync(file);
    ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    ::close(file);
  }
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::record([&] {
    if (argc < 4) throw accelerate::ConfigError("usage: bench_big_model WAY FOLDER TOKENS [cold]");
    const std::string way = argv[1];
    const fs::path folder = argv[2];
    const int64_t tokens = std::stoll(argv[3]);
    const bool cold = argc > 4;
    const double started = std::getenv("BENCH_START_MS") ? std::stod(std::getenv("BENCH_START_MS")) : now_ms();
    const auto offloaded = folder / ("offload_ours_" + way);
    fs::remove_all(offloaded);
    if (cold) forget(folder);

    const double begin = now_ms();
    accelerate::models::LlamaForCausalLM net = nullptr;
    {
      const auto empty = accelerate::init_empty_weights();
      net = accelerate::models::LlamaForCausalLM(accelerate::models::LlamaConfig::from_pretrained(folder),
                                                 accelerate::models::Weights::uninitialized);
    }
    net->eval();
    std::optional<accelerate::DispatchedModel> model;
    if (way == "load" || way == "read") {
      model = accelerate::load_checkpoint_and_dispatch(
          net, folder,
          {.device_map = accelerate::DeviceMap{{"", "disk"}},
           .offload = {.budget_bytes = way == "read" ? std::optional<int64_t>(600'000'000) : std::nullopt,
                       .always_read = way == "read"}});
    } else {
      accelerate::load_checkpoint_in_model(net, folder);
      if (way == "cpu_offload") model = accelerate::cpu_offload(net);
      if (way == "disk_offload") model = accelerate::disk_offload(net, offloaded);
    }
    const double load = now_ms() - begin;
    const torch::InferenceMode inference;
    const auto ids = torch::tensor({{17}});
    std::vector<double> ms;
    at::Tensor logits;
    double first = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      const double start = now_ms();
      logits = net->forward(ids);
      ms.push_back(now_ms() - start);
      if (i == 0) first = now_ms() - started;
    }
    const auto last = logits.select(1, -1).squeeze(0).slice(0, 0, 8).to(torch::kDouble).contiguous();
    std::cout << "{\"contestant\":\"ours\",\"answer\":[";
    for (int64_t i = 0; i < last.numel(); ++i) std::cout << (i ? "," : "") << last.const_data_ptr<double>()[i];
    std::cout << "],\"load_ms\":" << load << ",\"first_ms\":" << first << ",\"ms\":[";
    for (size_t i = 0; i < ms.size(); ++i) std::cout << (i ? "," : "") << ms[i];
    std::cout << "]}" << std::endl;
    fs::remove_all(offloaded);
  });
}
