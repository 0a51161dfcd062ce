/// Models whose parts lie on the GPU, in host memory and on disk.
#include <accelerate/accelerate.hpp>
#include <accelerate/models/generate.hpp>
#include <accelerate/models/gpt2.hpp>
#include <accelerate/models/llama.hpp>

#include <set>

#include "gpu.hpp"
#include "scratch.hpp"

namespace gpu_test {
namespace {

using namespace accelerate;
using models::GPT2Config;
using models::GPT2LMHeadModel;
using models::LlamaConfig;
using models::LlamaForCausalLM;

class GpuBigModel : public GpuTest {
 protected:
  ~GpuBigModel() override { residency::set_paranoid(false); }
};
class GpuGenerate : public GpuTest {};

/// Weights large enough that logits are far apart, so that rounding decides on no token.
GPT2Config small_gpt2() {
  return {.vocab_size = 128, .n_positions = 64, .n_embd = 64, .n_layer = 8, .n_head = 4, .initializer_range = 0.2};
}
LlamaConfig small_llama() {
  LlamaConfig config;
  config.vocab_size = 128;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.initializer_range = 0.2;
  return config;
}

at::Tensor some_ids(const at::Device& where) {
  return torch::randint(128, {2, 12}, at::make_generator<at::CPUGeneratorImpl>(7)).to(where);
}

GPT2LMHeadModel fresh_gpt2() {
  torch::manual_seed(3);
  GPT2LMHeadModel net(small_gpt2());
  net->eval();
  return net;
}

GPT2LMHeadModel empty_gpt2() {
  const auto empty = init_empty_weights();
  GPT2LMHeadModel net(small_gpt2());
  net->eval();
  return net;
}

int64_t bytes_of(const torch::nn::Module& module) {
  std::set<const void*> seen;
  int64_t bytes = 0;
  for (const auto& parameter : module.parameters())
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) bytes += static_cast<int64_t>(parameter.nbytes());
  return bytes;
}

/// The places that a map uses.
std::set<std::string> places_of(const DeviceMap& map) {
  std::set<std::string> places;
  for (const auto& [name, place] : map) places.insert(place.str());
  return places;
}

TEST_F(GpuBigModel, DeviceMapsGiveTheAnswersOfTheModelOnOneDevice) {
  const torch::InferenceMode inference;
  auto whole = fresh_gpt2();
  const auto folder = support::scratch("weights");
  checkpointing::save_model(ModelRef(whole.ptr()), folder, int64_t{1} << 30, true);
  const auto bytes = static_cast<double>(bytes_of(*whole));
  const auto on_host = whole(some_ids(at::kCPU));
  whole->to(device());
  const auto expected = whole(some_ids(device()));
  EXPECT_TRUE(close(expected, on_host, 1e-4));
  // Each place keeps room for the largest layer, which is an eighth.
  const MaxMemory memory =
      on_cuda() ? MaxMemory{{0, 0.5 * bytes}, {"cpu", 0.4 * bytes}} : MaxMemory{{"cpu", 0.6 * bytes}};
  for (const bool paranoid : {false, true})
    for (const std::string strategy : {"auto", "balanced", "balanced_low_0", "sequential"}) {
      SCOPED_TRACE(strategy + (paranoid ? ", paranoid" : ""));
      residency::set_paranoid(paranoid);
      auto net = empty_gpt2();
      const auto model = load_checkpoint_and_dispatch(net, folder,
                                                      {.device_map = strategy,
                                                       .max_memory = memory,
                                                       .no_split_module_classes = {"GPT2Block"},
                                                       .offload = {.always_read = true}});
      const auto places = places_of(model.hf_device_map());
      if (strategy == "auto") {
        EXPECT_EQ(places,
                  on_cuda() ? (std::set<std::string>{"0", "cpu", "disk"}) : (std::set<std::string>{"cpu", "disk"}));
      }
      EXPECT_GT(model.streamed_bytes(), 0);
      for (int pass = 0; pass < 3; ++pass) {
        const auto found = model(some_ids(device()));
        // balanced_low_0 may leave a lone GPU out: then the host computes.
        if (model.main_device() == device()) {
          EXPECT_TRUE(same_bits(found, expected)) << "pass " << pass;
        } else {
          EXPECT_TRUE(close(found, expected, 1e-4)) << "pass " << pass;
        }
      }
    }
}

TEST_F(GpuBigModel, AWholeModelOnTheGpu) {
  const torch::InferenceMode inference;
  auto whole = fresh_gpt2();
  const auto folder = support::scratch("weights");
  checkpointing::save_model(ModelRef(whole.ptr()), folder, 100'000, true);  // several shards
  whole->to(device());
  auto net = empty_gpt2();
  const auto model =
      load_checkpoint_and_dispatch(net, folder, {.device_map = DeviceMap{{"", on_cuda() ? Place(0) : Place("cpu")}}});
  EXPECT_EQ(model.main_device(), device());
  for (const auto& parameter : net->parameters()) EXPECT_EQ(parameter.device(), device());
  EXPECT_TRUE(same_bits(model(some_ids(device())), whole(some_ids(device()))));
  // Inputs from the host are brought, and the result goes back to them.
  EXPECT_TRUE(model(some_ids(at::kCPU)).is_cpu());
}

/// Layers that compute where they lie: activations go to and fro.
TEST_F(GpuBigModel, LayersOnTheGpuAndOnTheHost) {
  const at::NoGradGuard no_grad;
  Mlp net(64, 4), whole(64, 4);
  const Place gpu = on_cuda() ? Place(0) : Place("cpu");
  const auto model = dispatch_model(net, {{"layer0", "cpu"}, {"layer1", gpu}, {"layer2", "cpu"}, {"layer3", gpu}},
                                    {.main_device = at::Device(at::kCPU)});
  const auto x = numbers({5, 64}, 1, at::kCPU);
  EXPECT_EQ(net->layers[1]->weight.device(), device());
  EXPECT_TRUE(net->layers[2]->weight.is_cpu());
  for (int pass = 0; pass < 3; ++pass) EXPECT_TRUE(close(model(x), whole(x), 1e-5));
}

int64_t tokens() { return on_gpu() ? 20 : 5; }

template <class Model> void same_tokens(Model& on_host, Model& on_device) {
  on_host->eval();
  on_device->eval();
  on_device->to(device());
  for (const int64_t beams : {1, 3}) {
    const models::GenerationConfig config{.max_new_tokens = tokens(), .num_beams = beams};
    const auto expected = models::generate(on_host, some_ids(at::kCPU), config);
    const auto found = models::generate(on_device, some_ids(device()), config);
    EXPECT_EQ(found.device(), device());
    EXPECT_TRUE(same_bits(found, expected)) << beams << " beams:\n" << found.cpu() << "\n" << expected;
  }
}

TEST_F(GpuGenerate, Gpt2GivesTheTokensThatItGivesOnTheCpu) {
  auto a = fresh_gpt2(), b = fresh_gpt2();
  same_tokens(a, b);
}

TEST_F(GpuGenerate, LlamaGivesTheTokensThatItGivesOnTheCpu) {
  torch::manual_seed(3);
  LlamaForCausalLM a(small_llama());
  torch::manual_seed(3);
  LlamaForCausalLM b(small_llama());
  same_tokens(a, b);
}

/// Sampling draws on the device: the same seed gives the same tokens there.
TEST_F(GpuGenerate, SamplingRepeatsWithItsSeed) {
  auto net = fresh_gpt2();
  net->to(device());
  const models::GenerationConfig config{.max_new_tokens = tokens(), .do_sample = true};
  const auto sample = [&](uint64_t seed) {
    torch::manual_seed(seed);
    return models::generate(net, some_ids(device()), config);
  };
  const auto first = sample(1);
  EXPECT_TRUE(same_bits(sample(1), first));
  EXPECT_FALSE(same_bits(sample(2), first));
}

/// A decode loop through weights in host memory.
TEST_F(GpuGenerate, OffloadedModelsGiveTheSameTokens) {
  auto whole = fresh_gpt2(), net = fresh_gpt2();
  whole->to(device());
  const auto model = cpu_offload(net, {.execution_device = device(), .offload = {.budget_bytes = bytes_of(*net) / 2}});
  const models::GenerationConfig config{.max_new_tokens = tokens()};
  EXPECT_TRUE(same_bits(models::generate(net, some_ids(device()), config),
                        models::generate(whole, some_ids(device()), config)));
}

}  // namespace
}  // namespace gpu_test
