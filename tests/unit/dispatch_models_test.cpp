// A real model in little memory: SmolLM2-135M from its 4-bit file.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "accelerate/bigmodel.hpp"
#include "accelerate/models/llama.hpp"
#include "accelerate/residency.hpp"
#include "python.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::models::LlamaConfig;
using accelerate::models::LlamaForCausalLM;

TEST(DispatchModels, SmolLM2In150MegabytesOfWeights) {
  SKIP_WITHOUT_DATA();
  const fs::path file = *support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf";
  LlamaForCausalLM net = nullptr;
  {
    const auto empty = accelerate::init_empty_weights();
    net = LlamaForCausalLM(LlamaConfig::from_pretrained(file), accelerate::models::Weights::uninitialized);
  }
  net->eval();
  constexpr int64_t kBudget = 150'000'000;  // of 538 MB in fp32; the embeddings, which are the head too, take 113 MB
  const auto before = accelerate::residency::stats().resident_bytes;
  accelerate::residency::reset_stats();
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, file, {.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = kBudget}});
  const torch::InferenceMode inference;
  const auto ids = torch::tensor({{1, 4093, 198, 2683, 359, 253, 5356}});
  auto whole = LlamaForCausalLM::from_pretrained(file);
  whole->eval();
  const auto expected = whole(ids);
  EXPECT_TRUE(torch::equal(model(ids), expected));
  EXPECT_LE(accelerate::residency::stats().peak_resident_bytes - before, kBudget);
  accelerate::residency::reset_stats();
  EXPECT_TRUE(torch::equal(model(ids), expected)) << "once more, now that the order of use is known";
  const auto stats = accelerate::residency::stats();
  EXPECT_LE(stats.peak_resident_bytes - before, kBudget);
  EXPECT_LE(stats.bytes_fetched, 538'000'000 - 113'000'000)
      << "the embeddings, needed at both ends of every pass, stay: only layers are read";
  EXPECT_GT(stats.prefetch_hits, 5 * stats.faults);
}

}  // namespace
