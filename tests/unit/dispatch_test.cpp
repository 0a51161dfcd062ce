// Models whose weights are elsewhere: the same results in less memory, and what is said when that can't be.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/model/hooks.hpp"
#include "accelerate/residency.hpp"
#include "accelerate/utils/error.hpp"
#include "message_of.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
namespace residency = accelerate::residency;
using accelerate::DeviceMap;
using accelerate::MaxMemory;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;

constexpr int64_t kWidth = 64, kLayers = 8;
constexpr int64_t kWeightBytes = kWidth * kWidth * 4, kBiasBytes = kWidth * 4, kLayerBytes = kWeightBytes + kBiasBytes;

struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

/// Equal blocks, a norm with buffers, and a head that shares the first block's weight.
struct StackImpl : torch::nn::Module {
  StackImpl() : norm(kWidth) {
    for (int64_t i = 0; i < kLayers; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block()));
    register_module("norm", norm);
    head = register_module("head", std::make_shared<torch::nn::Module>("HeadImpl"));
    head->register_parameter("weight", blocks.front()->linear->weight);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = block(x);
    return norm(x).matmul(head->named_parameters()["weight"].t());
  }
  std::vector<Block> blocks;
  torch::nn::BatchNorm1d norm;
  std::shared_ptr<torch::nn::Module> head;
};
TORCH_MODULE(Stack);

class Dispatch : public testing::Test {
 protected:
  Dispatch()
      : folder(fs::path(support::scratch_dir()) / testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(folder);
    torch::manual_seed(5);
    whole = Stack();
    whole->norm->running_mean.uniform_();
    whole->eval();
    accelerate::checkpointing::save_model(accelerate::ModelRef(whole.ptr()), folder, 1 << 30, true);
    input = torch::randn({3, kWidth});
    expected = whole(input);
  }
  ~Dispatch() override { residency::set_paranoid(false); }
  static Stack empty() {
    Stack model = nullptr;
    {
      const auto scope = accelerate::init_empty_weights();
      model = Stack();
    }
    model->eval();
    return model;
  }
  template <class Model> void expect_equal(const Model& model, int times = 3) {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < times; ++i) EXPECT_TRUE(torch::equal(model(input), expected)) << "pass " << i;
  }
  template <class Error = accelerate::ConfigError, class F> static std::string error(F&& f) {
    return support::message_of<Error>(f);
  }

  fs::path folder;
  Stack whole = nullptr;
  at::Tensor input, expected;
};

TEST_F(Dispatch, AModelOnDiskComputesAlikeWithinItsBudget) {
  auto net = empty();
  const int64_t budget = 4 * kLayerBytes;
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = budget}});
  EXPECT_GE(model.streamed_bytes(), kLayers * kLayerBytes);
  EXPECT_EQ(model.hf_device_map(), (DeviceMap{{"", "disk"}}));
  residency::reset_stats();
  const auto before = residency::stats().resident_bytes;
  expect_equal(model, 1);
  EXPECT_GT(residency::stats().prefetch_hits, 0)
      << "in the first pass too: the modules' order is taken for that of use";
  residency::reset_stats();
  expect_equal(model, 5);
  const auto stats = residency::stats();
  EXPECT_LE(stats.peak_resident_bytes - before, budget);
  EXPECT_GT(stats.prefetch_hits, stats.faults) << "what comes next is read ahead";
  // Farthest next use first: a part of the model stays, so that less than everything is read in each pass. (Evicting
  // what was used longest ago reads everything.)
  EXPECT_LT(stats.bytes_fetched, 5 * kLayers * kLayerBytes * 9 / 10);
}

TEST_F(Dispatch, WhatFitsIsMappedAndNothingIsRead) {
  auto net = empty();
  residency::reset_stats();
  const auto model = accelerate::load_checkpoint_and_dispatch(net, folder, {.device_map = DeviceMap{{"", "disk"}}});
  EXPECT_EQ(model.streamed_bytes(), 0);
  EXPECT_FALSE(accelerate::has_offloaded_params(net->blocks[1]->linear));
  expect_equal(model);
  EXPECT_EQ(residency::stats().bytes_fetched, 0);
}

TEST_F(Dispatch, EveryMapAndEveryWayGivesTheSameBits) {
  const std::vector<DeviceMap> maps = {{{"", "cpu"}},
                                       {{"", "disk"}},
                                       {{"", "cpu"}, {"block3", "disk"}, {"block4", "disk"}},
                                       {{"", "disk"}, {"block0.linear.weight", "cpu"}},
                                       {{"", "disk"}, {"norm", "cpu"}}};
  for (const auto& map : maps)
    for (const bool always_read : {false, true})
      for (const bool buffers : {false, true})
        for (const bool paranoid : {false, true}) {
          residency::set_paranoid(paranoid);
          {
            auto net = empty();
            const auto model = accelerate::load_checkpoint_and_dispatch(
                net, folder, {.device_map = map, .offload_buffers = buffers, .offload = {.always_read = always_read}});
            expect_equal(model, 2);
            net->forward(input);  // weights come also when the handle is not what is called
          }
          {
            auto copy = std::dynamic_pointer_cast<StackImpl>(Stack().ptr());
            accelerate::load_checkpoint_in_model(Stack(copy), folder);
            copy->eval();
            const auto offload_dir = folder / "offload";
            fs::remove_all(offload_dir);
            const auto model = accelerate::dispatch_model(
                Stack(copy), map,
                {.offload_dir = offload_dir, .offload_buffers = buffers, .offload = {.always_read = always_read}});
            expect_equal(model, 2);
          }
        }
}

TEST_F(Dispatch, StrategiesPlaceByMemory) {
  for (const char* strategy : {"auto", "balanced", "balanced_low_0", "sequential"}) {
    auto net = empty();
    const auto model = accelerate::load_checkpoint_and_dispatch(net, folder,
                                                                {.device_map = strategy,
                                                                 .max_memory = MaxMemory{{"cpu", 5 * kLayerBytes}},
                                                                 .no_split_module_classes = {"Block"}});
    EXPECT_GT(model.hf_device_map().size(), 1U) << strategy;
    EXPECT_GT(model.streamed_bytes(), 0);
    EXPECT_LT(model.streamed_bytes(), kLayers * kLayerBytes);
    residency::reset_stats();
    const auto before = residency::stats().resident_bytes;
    expect_equal(model);
    int64_t in_memory = 0;
    for (const auto& [name, tensor] : accelerate::ModelRef(net.ptr()).parameters())
      if (accelerate::place_of(model.hf_device_map(), name)->is_cpu())
        in_memory += static_cast<int64_t>(tensor.nbytes());
    EXPECT_LE(in_memory + residency::stats().peak_resident_bytes - before, 5 * kLayerBytes)
        << "max_memory is for all weights in host memory";
  }
}

TEST_F(Dispatch, WithoutAMapTheModelIsLoaded) {
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(net, folder);
  EXPECT_EQ(model.streamed_bytes(), 0);
  EXPECT_TRUE(model.hf_device_map().empty());
  expect_equal(model);
}

TEST_F(Dispatch, AModelInMemoryMovesToDiskAndIsReadFromThereAgain) {
  const auto place = folder / "offloaded";
  {
    const auto model = accelerate::disk_offload(whole, place, {.offload = {.always_read = true}});
    EXPECT_TRUE(fs::exists(place / "index.json"));
    EXPECT_TRUE(fs::exists(place / "block3.linear.weight.dat"));
    EXPECT_FALSE(fs::exists(place / "head.weight.dat")) << "a tied weight is one weight";
    EXPECT_GE(model.streamed_bytes(), kLayers * kLayerBytes);
    EXPECT_TRUE(accelerate::has_offloaded_params(whole->blocks[1]->linear));
    EXPECT_FALSE(accelerate::has_offloaded_params(whole->blocks[1])) << "its own only";
    expect_equal(model);
  }
  auto net = empty();
  net->norm->running_mean.copy_(whole->norm->running_mean);
  const auto model = accelerate::disk_offload(net, place, {.offload = {.budget_bytes = 3 * kLayerBytes}});
  expect_equal(model);
}

TEST_F(Dispatch, AFolderWithOtherValuesThanTheModelIsRefusedByName) {
  const auto place = folder / "offloaded";
  accelerate::offload_state_dict(place, accelerate::ModelRef(whole.ptr()).state());
  {
    const torch::NoGradGuard no_grad;
    whole->blocks[1]->linear->weight.add_(1);
  }
  EXPECT_THAT(error<accelerate::CheckpointError>([&] { (void)accelerate::disk_offload(whole, place); }),
              AllOf(HasSubstr("'block1.linear.weight'"), HasSubstr(place.string())));
  EXPECT_FALSE(torch::equal(whole(input), expected)) << "the model stays as it is";
  // A caller that names the index wants its values.
  const auto model = accelerate::dispatch_model(
      whole, DeviceMap{{"", "disk"}}, {.offload_dir = place, .offload_index = accelerate::load_offload_index(place)});
  expect_equal(model);
}

TEST_F(Dispatch, ACheckpointOfTorchSaveIsReadWhereItLies) {
  const auto file = folder / "pytorch_model.bin";
  std::map<std::string, at::Tensor> state;
  for (const auto& [name, tensor] : accelerate::ModelRef(whole.ptr()).state()) state[name] = tensor.detach();
  accelerate::checkpointing::save_object(accelerate::checkpointing::to_dict(state), file);
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(net, file, {.device_map = DeviceMap{{"", "disk"}}});
  EXPECT_GE(model.streamed_bytes(), kLayers * kLayerBytes);
  expect_equal(model);
}

/// The stack's weights as a GGUF file of an architecture that has no names of its own: matrices in blocks of 32 8-bit
/// numbers with a scale, vectors in fp32.
void write_gguf(const fs::path& path, const Stack& model) {
  std::string head, data;
  const auto number = [&head](auto value) { head.append(reinterpret_cast<const char*>(&value), sizeof value); };
  const auto text = [&](const std::string& value) { number(static_cast<uint64_t>(value.size())), head += value; };
  const auto state = accelerate::checkpointing::state_dict(accelerate::ModelRef(model.ptr()));
  std::map<std::string, at::Tensor> tensors(state.begin(), state.end());
  tensors.erase("norm.num_batches_tracked");
  number(uint32_t{0x46554747}), number(uint32_t{3}), number(static_cast<uint64_t>(tensors.size())), number(uint64_t{1});
  text("general.architecture"), number(uint32_t{8}), text("unknown");
  for (const auto& [name, tensor] : tensors) {
    text(name), number(static_cast<uint32_t>(tensor.dim()));
    for (int64_t dim = tensor.dim(); dim-- > 0;) number(static_cast<uint64_t>(tensor.size(dim)));
    number(uint32_t{tensor.dim() == 2 ? 8U : 0U}), number(static_cast<uint64_t>(data.size()));
    if (tensor.dim() == 2) {
      for (int64_t block = 0; block < tensor.numel() / 32; ++block) {
        const c10::Half scale(0.001F * static_cast<float>(1 + block % 3));
        data.append(reinterpret_cast<const char*>(&scale), 2);
        for (int64_t i = 0; i < 32; ++i) data.push_back(static_cast<char>((block * 37 + i * 11) % 251 - 125));
      }
    } else {
      data.append(static_cast<const char*>(tensor.contiguous().const_data_ptr()), tensor.nbytes());
    }
    data.resize((data.size() + 31) / 32 * 32);
  }
  head.resize((head.size() + 31) / 32 * 32);
  std::ofstream(path, std::ios::binary) << head << data;
}

TEST_F(Dispatch, CodesOfAGgufFileAreDecodedWhenTheyAreFetched) {
  write_gguf(folder / "model.gguf", whole);
  auto in_memory = empty();
  accelerate::load_checkpoint_in_model(in_memory, folder / "model.gguf", {.strict = false});
  const auto wanted = in_memory(input);
  EXPECT_FALSE(torch::equal(wanted, expected));
  const auto model = [&, net = empty()] {
    return accelerate::load_checkpoint_and_dispatch(
        net, folder / "model.gguf",
        {.device_map = DeviceMap{{"", "disk"}}, .strict = false, .offload = {.budget_bytes = 3 * kLayerBytes}});
  }();
  EXPECT_GE(model.streamed_bytes(), kLayers * kLayerBytes) << "in fp32";
  expected = wanted;
  expect_equal(model);
}

TEST_F(Dispatch, OtherDtypesAreConvertedAtEachUseOrOnceInAFolder) {
  auto half = Stack();
  accelerate::load_checkpoint_in_model(half, folder);
  half->to(torch::kBFloat16);
  half->eval();
  const auto wanted = half(input.to(torch::kBFloat16));
  for (const auto& offload_folder : {fs::path(), folder / "converted"}) {
    auto net = empty();
    const auto model = accelerate::load_checkpoint_and_dispatch(
        net, folder,
        {.device_map = DeviceMap{{"", "disk"}}, .offload_folder = offload_folder, .dtype = torch::kBFloat16});
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(torch::equal(model(input.to(torch::kBFloat16)), wanted));
    EXPECT_EQ(model.streamed_bytes() > 0, offload_folder.empty());
    EXPECT_EQ(fs::exists(folder / "converted" / "block0.linear.weight.dat"), !offload_folder.empty());
  }
}

TEST_F(Dispatch, TwoModelsAtOnce) {
  auto one = empty(), two = empty();
  const accelerate::LoadAndDispatchOptions options{.device_map = DeviceMap{{"", "disk"}},
                                                   .offload = {.budget_bytes = 2 * kLayerBytes}};
  const auto first = accelerate::load_checkpoint_and_dispatch(one, folder, options);
  const auto second = accelerate::load_checkpoint_and_dispatch(two, folder, options);
  for (int i = 0; i < 2; ++i) expect_equal(first, 1), expect_equal(second, 1);
  std::thread other([&] { expect_equal(second); });
  expect_equal(first);
  other.join();
}

TEST_F(Dispatch, ChangesAreKeptAndTheCheckpointStays) {
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = 2 * kLayerBytes}});
  {
    const torch::NoGradGuard no_grad;
    net->blocks[2]->linear->bias.add_(1);
    whole->blocks[2]->linear->bias.add_(1);
  }
  expected = whole(input);
  expect_equal(model);
  EXPECT_FALSE(torch::equal(accelerate::load_safetensors(folder / "model.safetensors").at("block2.linear.bias"),
                            whole->blocks[2]->linear->bias));
}

TEST_F(Dispatch, ValuesMayComeFromAStateDict) {
  std::map<std::string, at::Tensor> state;
  for (const auto& [name, tensor] : accelerate::ModelRef(whole.ptr()).state()) state[name] = tensor.detach();
  auto net = empty();
  const auto model = accelerate::cpu_offload(net, {.state_dict = state});
  expect_equal(model);
  auto bad = empty();
  state["block1.linear.bias"] = torch::zeros({3});
  EXPECT_THAT(error<accelerate::ShapeError>([&] { (void)accelerate::cpu_offload(bad, {.state_dict = state}); }),
              HasSubstr("block1.linear.bias: [3] given, [64] in the model"));
}

TEST_F(Dispatch, OnTheMetaDeviceOffloadingIsADryRun) {
  // As on a GPU: weights in host memory or files, inputs sent to where they compute. The result has shapes only, so
  // it isn't sent back.
  const auto model = accelerate::cpu_offload(whole, {.execution_device = at::kMeta});
  EXPECT_GE(model.streamed_bytes(), kLayers * kLayerBytes);
  EXPECT_EQ(model.main_device(), at::kMeta);
  residency::reset_stats();
  const torch::NoGradGuard no_grad;
  at::Tensor out = input.to(at::kMeta);
  for (auto& block : whole->blocks) out = block(out);  // LibTorch has no batch norm for the meta device
  EXPECT_TRUE(out.is_meta());
  EXPECT_EQ(out.sizes(), input.sizes());
  EXPECT_GT(residency::stats().bytes_fetched, 0);
}

TEST_F(Dispatch, WhatIsMovedIsNamed) {
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = 4 * kLayerBytes}});
  net->to(torch::kDouble);
  EXPECT_THAT(error([&] { model(input); }), AllOf(HasSubstr("was moved or replaced after the model was dispatched"),
                                                  HasSubstr("'block0.linear.weight'")));
}

TEST_F(Dispatch, WithoutItsOwnerAnOffloadedWeightSaysSo) {
  auto net = empty();
  {
    const auto model = accelerate::load_checkpoint_and_dispatch(
        net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.always_read = true}});
  }
  // LibTorch's own error would have a stack behind it.
  EXPECT_THAT(error([&] { net->forward(input); }), EndsWith("keep that while the module is in use"));
}

TEST_F(Dispatch, RawAccessGoesThroughAlign) {
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.always_read = true}});
  auto& linear = net->blocks[5]->linear;
  EXPECT_TRUE(accelerate::has_offloaded_params(linear));
  EXPECT_THAT(support::message_of<std::exception>([&] { linear->weight.data_ptr(); }), HasSubstr("is not resident"));
  {
    const auto here = accelerate::align_module_device(linear);
    EXPECT_EQ(linear->weight.data_ptr<float>()[7], whole->blocks[5]->linear->weight.data_ptr<float>()[7]);
    linear->bias.data_ptr<float>()[0] = 3;
  }
  EXPECT_EQ(linear->bias.sum().item<float>(),
            whole->blocks[5]->linear->bias.index_fill(0, torch::tensor({0}), 3).sum().item<float>());
  EXPECT_THAT(error([&] { const auto there = accelerate::align_module_device(linear, at::Device(at::kMeta)); }),
              HasSubstr("is offloaded and computes on cpu"));
  {
    const auto there = accelerate::align_module_device(whole->blocks[0]->linear, at::Device(at::kMeta));
    EXPECT_TRUE(whole->blocks[0]->linear->weight.is_meta());
  }
  expected = whole(input);
  EXPECT_TRUE(expected.is_cpu());
}

TEST_F(Dispatch, OnlyWhatWasChangedThroughAlignIsStored) {
  auto net = empty();
  const auto model = accelerate::load_checkpoint_and_dispatch(
      net, folder, {.device_map = DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = 2 * kLayerBytes}});
  auto& linear = net->blocks[5]->linear;
  const auto stored_by = [&](auto&& look) {
    residency::reset_stats();
    {
      const auto here = accelerate::align_module_device(linear);
      look(linear->bias.template data_ptr<float>());
    }
    const torch::NoGradGuard no_grad;
    model(input);  // the others push it out
    return residency::stats().bytes_stored;
  };
  EXPECT_EQ(stored_by([](const float* values) { EXPECT_NE(values[0], 3); }), 0);
  EXPECT_GE(stored_by([](float* values) { values[0] = 3; }), kBiasBytes);
  EXPECT_EQ(linear->bias[0].item<float>(), 3);
}

TEST_F(Dispatch, MapsAndBudgetsAreCheckedBeforeAnythingIsLoaded) {
  auto net = empty();
  const auto dispatching = [&](accelerate::LoadAndDispatchOptions options) {
    return error([&] { (void)accelerate::load_checkpoint_and_dispatch(net, folder, options); });
  };
  EXPECT_THAT(dispatching({.device_map = DeviceMap{{"blok3", "disk"}, {"", "cpu"}}}),
              AllOf(HasSubstr("name no module"), HasSubstr("block3")));
  EXPECT_THAT(dispatching({.device_map = DeviceMap{{"block3", "disk"}}}), HasSubstr("has no place for"));
  EXPECT_THAT(dispatching({.device_map = DeviceMap{{"", 7}}}),
              HasSubstr("found the whole model on GPU 7, but this machine has"));
  EXPECT_THAT(dispatching({.device_map = DeviceMap{{"block3", 7}, {"", "cpu"}}}),
              HasSubstr("found 'block3' on GPU 7, but this machine has"));
  EXPECT_THAT(dispatching({.device_map = "evenly"}), HasSubstr("evenly"));
  for (const auto& map :
       {std::variant<std::string, DeviceMap>("auto"), std::variant<std::string, DeviceMap>(DeviceMap{{"", "cpu"}})})
    EXPECT_THAT(dispatching({.device_map = map, .no_split_module_classes = {"Block", "Blok"}}),
                AllOf(HasSubstr("no_split_module_classes names 'Blok', which is no class of a module of this model"),
                      HasSubstr("did you mean Block?")));
  EXPECT_THAT(error([&] { accelerate::infer_auto_device_map(net, {.no_split_module_classes = {"BlockImpl"}}); }),
              HasSubstr("infer_auto_device_map: no_split_module_classes names 'BlockImpl'"));
  EXPECT_THAT(dispatching({.device_map = DeviceMap{{"", "disk"}}, .offload = {.budget_bytes = kLayerBytes - 1}}),
              AllOf(HasSubstr("less than 'block0.linear' needs"),
                    HasSubstr("At least " + std::to_string(kLayerBytes) + " bytes")));
  EXPECT_THAT(dispatching({.device_map = "auto", .max_memory = MaxMemory{{"cpu", kWeightBytes / 2}}}),
              HasSubstr("At least " + std::to_string(kLayerBytes) + " bytes"));
  EXPECT_THAT(dispatching({.device_map = "auto", .full_state_dict = false}), HasSubstr("full_state_dict = false"));
  EXPECT_THAT(dispatching({.device_map = "auto", .broadcast_from_rank0 = true}), HasSubstr("broadcast_from_rank0"));
  EXPECT_THAT(dispatching({.max_memory = MaxMemory{{"cpu", 1}}}), HasSubstr("max_memory without a device_map"));
  EXPECT_THAT(error([&] {
                (void)accelerate::dispatch_model(whole, {{"", "disk"}});
              }),
              HasSubstr("offload_dir is empty"));
  EXPECT_THAT(error([&] {
                (void)accelerate::dispatch_model(net, {{"", "cpu"}});
              }),
              AllOf(HasSubstr("have no values"), HasSubstr("block0.linear.weight")));
  const auto missing = error([&] { (void)accelerate::disk_offload(net, folder / "offload"); });
  EXPECT_THAT(missing, AllOf(HasSubstr("block0.linear.weight"), HasSubstr("in all)")));
  EXPECT_LE(std::count(missing.begin(), missing.end(), '\n'), 7) << "not the name of every weight";
  for (const auto& [name, tensor] : accelerate::ModelRef(net.ptr()).parameters()) EXPECT_TRUE(tensor.is_meta()) << name;
}

TEST_F(Dispatch, DamagedCheckpointsAndFoldersAreNamed) {
  auto net = empty();
  const auto dispatching = [&](const fs::path& path) {
    return error<accelerate::CheckpointError>([&] {
      (void)accelerate::load_checkpoint_and_dispatch(net, path, {.device_map = DeviceMap{{"", "disk"}}});
    });
  };
  auto tensors = accelerate::load_safetensors(folder / "model.safetensors");
  fs::create_directories(folder / "shards");
  std::ofstream(folder / "shards" / "model.safetensors.index.json")
      << R"({"weight_map": {"block0.linear.weight": "model-1.safetensors"}})";
  EXPECT_THAT(dispatching(folder / "shards"), HasSubstr("model-1.safetensors"));
  accelerate::save_safetensors(folder / "shards" / "model-1.safetensors", {{"other", torch::zeros({2})}});
  EXPECT_THAT(dispatching(folder / "shards"), HasSubstr("block0.linear.weight (in model-1.safetensors)"));
  tensors.erase("block4.linear.bias");
  tensors["block2.linear.weight"] = torch::zeros({3, 4});
  accelerate::save_safetensors(folder / "lacking.safetensors", tensors);
  EXPECT_THAT(dispatching(folder / "lacking.safetensors"),
              AllOf(HasSubstr("block4.linear.bias"), HasSubstr("block2.linear.weight: [3, 4]"),
                    HasSubstr("Nothing was loaded")));
  accelerate::offload_state_dict(folder / "offload", {{"block0.linear.weight", torch::zeros({2, 2})}});
  EXPECT_THAT(error<accelerate::CheckpointError>([&] { (void)accelerate::disk_offload(whole, folder / "offload"); }),
              HasSubstr("is of shape [2, 2] in the offload folder"));
}

// Hooks.

struct Recorder : accelerate::ModelHook {
  Recorder(std::string name, std::vector<std::string>& log) : name(std::move(name)), log(log) {}
  void init_hook(const accelerate::ModelRef&) override { log.push_back(name + " init"); }
  void pre_forward(const accelerate::ModelRef&, std::vector<at::Tensor>& inputs) override {
    log.push_back(name + " pre " + std::to_string(inputs.size()));
    inputs.front() = inputs.front() + 1;
  }
  void post_forward(const accelerate::ModelRef&, std::vector<at::Tensor>& outputs) override {
    log.push_back(name + " post");
    outputs.front() = outputs.front() * 2;
  }
  void detach_hook(const accelerate::ModelRef&) override { log.push_back(name + " detach"); }
  std::string name;
  std::vector<std::string>& log;
};

TEST_F(Dispatch, HooksRunAroundCalls) {
  std::vector<std::string> log;
  const auto model = accelerate::cpu_offload(whole);
  accelerate::add_hook_to_module(whole, std::make_shared<Recorder>("a", log));
  const auto plain = [&](const at::Tensor& x) { return whole->forward(x); };
  EXPECT_TRUE(torch::equal(model(input), plain(input + 1) * 2));
  accelerate::add_hook_to_module(whole, std::make_shared<Recorder>("b", log), /*append=*/true);
  EXPECT_TRUE(torch::equal(model(input), plain(input + 1 + 1) * 2 * 2));
  accelerate::add_hook_to_module(whole, std::make_shared<Recorder>("c", log));
  accelerate::remove_hook_from_module(whole);
  EXPECT_TRUE(torch::equal(model(input), plain(input)));
  EXPECT_THAT(error([&] { accelerate::add_hook_to_module(whole, nullptr); }), HasSubstr("null hook"));
  EXPECT_THAT(log, testing::ElementsAre("a init", "a pre 1", "a post", "b init", "a pre 1", "b pre 1", "a post",
                                        "b post", "a detach", "b detach", "c init", "c detach"));
}

TEST_F(Dispatch, ChainedModelsTakeTurnsOnTheDevice) {
  auto first = Block(), second = Block();
  const auto values = first->linear->weight.detach().clone();
  auto [one, one_hook] = accelerate::cpu_offload_with_hook(first, at::Device(at::kMeta));
  auto [two, two_hook] = accelerate::cpu_offload_with_hook(second, at::Device(at::kMeta), one_hook);
  EXPECT_TRUE(first->linear->weight.is_cpu());
  EXPECT_TRUE(one(input).is_meta());
  EXPECT_TRUE(one(input).is_meta());
  EXPECT_TRUE(first->linear->weight.is_meta()) << "stays for the next call";
  two(input);
  EXPECT_TRUE(first->linear->weight.is_cpu());
  EXPECT_TRUE(torch::equal(first->linear->weight, values)) << "the host kept its copy";
  EXPECT_TRUE(second->linear->weight.is_meta());
  two_hook.offload();
  EXPECT_TRUE(second->linear->weight.is_cpu());
  one_hook.remove();
  EXPECT_TRUE(one(input).is_cpu());
}

TEST(InitOnDevice, BuildsThere) {
  Block block = nullptr;
  {
    const auto scope = accelerate::init_on_device(at::kMeta);
    block = Block();
  }
  EXPECT_TRUE(block->linear->weight.is_meta());
}

}  // namespace
