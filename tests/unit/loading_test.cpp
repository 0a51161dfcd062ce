// Checkpoints into models: what is checked before, and where the weights are after.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>

#include "accelerate/bigmodel.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel_support.hpp"
#include "ranks.hpp"
#include "warnings_of.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::load_checkpoint_in_model;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

fs::path folder(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / ("loading_" + name);
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

/// An embedding, a body, and a head that has the embedding's weight.
struct NetImpl : torch::nn::Module {
  NetImpl() : words(10, 4), body(4, 4), norm(4), head(std::make_shared<torch::nn::Module>("HeadImpl")) {
    register_module("words", words);
    register_module("body", body);
    register_module("norm", norm);
    register_module("head", head);
    head->register_parameter("weight", words->weight);
  }
  at::Tensor forward(const at::Tensor& x) {
    return norm(torch::relu(body(words(x)))).matmul(head->named_parameters()["weight"].t());
  }
  torch::nn::Embedding words;
  torch::nn::Linear body;
  torch::nn::BatchNorm1d norm;
  std::shared_ptr<torch::nn::Module> head;
};
TORCH_MODULE(Net);

using Tensors = std::map<std::string, at::Tensor>;

Tensors state_of(const Net& net) {
  Tensors state;
  for (const auto& [name, tensor] : accelerate::ModelRef(net.ptr()).state()) state[name] = tensor.detach();
  state.erase("head.weight");  // a tied weight is saved once
  return state;
}

Net empty_net() {
  const auto scope = accelerate::init_empty_weights();
  return Net();
}

/// A trained net, its file, and what it computes.
struct Saved {
  explicit Saved(const std::string& name) : path(folder(name)) {
    torch::manual_seed(3);
    net->norm->running_mean.uniform_();
    net->eval();
    accelerate::save_safetensors(path / "model.safetensors", state_of(net), {{"format", "pt"}});
    expected = net(input);
  }
  fs::path path;
  Net net;
  at::Tensor input = torch::arange(6), expected;
};

at::Tensor output(Net& net, const at::Tensor& input) {
  net->eval();
  return net(input);
}

TEST(LoadCheckpoint, FillsAModelWithoutMemory) {
  Saved saved("empty");
  auto net = empty_net();
  const auto* weight = net->words->weight.unsafeGetTensorImpl();
  load_checkpoint_in_model(net, saved.path);
  EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected));
  EXPECT_EQ(net->words->weight.unsafeGetTensorImpl(), weight);
  EXPECT_EQ(net->head->named_parameters()["weight"].unsafeGetTensorImpl(), weight);
  EXPECT_TRUE(net->body->weight.requires_grad());
  output(net, saved.input).sum().backward();
  EXPECT_TRUE(net->body->weight.grad().defined());
}

TEST(LoadCheckpoint, PartsOnDiskLieInTheFileAndComputeAlike) {
  Saved saved("disk");
  auto net = empty_net();
  load_checkpoint_in_model(net, saved.path, {.device_map = accelerate::DeviceMap{{"", "disk"}, {"body", "cpu"}}});
  EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected));
  {
    const torch::NoGradGuard no_grad;
    net->words->weight.zero_();  // private pages
  }
  EXPECT_TRUE(torch::equal(accelerate::load_safetensors(saved.path / "model.safetensors").at("words.weight"),
                           saved.net->words->weight));
  const auto lies_in_file = [&](const at::Tensor& tensor) {
    std::ifstream maps("/proc/self/maps");
    const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    for (std::string line; std::getline(maps, line);) {
      const auto begin = std::stoull(line, nullptr, 16),
                 end = std::stoull(line.substr(line.find('-') + 1), nullptr, 16);
      if (address >= begin && address < end) return line.find("model.safetensors") != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(lies_in_file(net->words->weight));
  EXPECT_TRUE(
      lies_in_file(net->body->weight));  // it had no memory of its own: nothing is copied before it is written to
  EXPECT_FALSE(lies_in_file(net->norm->running_mean));  // buffers are in memory unless offload_buffers
  auto with_buffers = empty_net();
  load_checkpoint_in_model(with_buffers, saved.path,
                           {.device_map = accelerate::DeviceMap{{"", "disk"}}, .offload_buffers = true});
  EXPECT_TRUE(lies_in_file(with_buffers->norm->running_mean));
  EXPECT_TRUE(torch::equal(output(with_buffers, saved.input), saved.expected));
}

TEST(LoadCheckpoint, ConvertsAndKeepsWhatWasAskedFor) {
  Saved saved("half");
  auto net = empty_net();
  load_checkpoint_in_model(net, saved.path, {.dtype = at::kHalf, .keep_in_fp32_modules = {"norm"}});
  EXPECT_TRUE(torch::equal(net->body->weight, saved.net->body->weight.to(at::kHalf)));
  EXPECT_EQ(net->norm->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
  auto on_disk = empty_net();
  const accelerate::LoadCheckpointOptions options{.device_map = accelerate::DeviceMap{{"", "disk"}},
                                                  .dtype = at::kHalf};
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(on_disk, saved.path, options); }),
              AllOf(HasSubstr("converted to another dtype"), HasSubstr("Give offload_folder")));
  EXPECT_TRUE(accelerate::is_deferred(on_disk->body->weight));
  auto with_folder = options;
  with_folder.offload_folder = saved.path / "offload";
  load_checkpoint_in_model(on_disk, saved.path, with_folder);
  EXPECT_TRUE(torch::equal(on_disk->body->weight, saved.net->body->weight.to(at::kHalf)));
  EXPECT_TRUE(torch::equal(accelerate::OffloadedWeightsLoader({.save_folder = saved.path / "offload"})["body.weight"],
                           on_disk->body->weight));
}

TEST(LoadCheckpoint, ReadsShardsAndFilesOfTorchSave) {
  Saved saved("shards");
  for (const bool safe : {true, false}) {
    const auto path = saved.path / (safe ? "safe" : "pickled");
    accelerate::checkpointing::save_model(accelerate::ModelRef(saved.net.ptr()), path, 100, safe);
    auto net = empty_net();
    load_checkpoint_in_model(net, path);
    EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected)) << safe;
  }
  fs::remove(saved.path / "safe" / "model-00001-of-00003.safetensors");
  auto net = empty_net();
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, saved.path / "safe"); }),
              AllOf(HasSubstr("not there: model-00001-of-00003.safetensors"), HasSubstr("Copy or download all")));
}

TEST(LoadCheckpoint, AllDifferencesAreListedBeforeAnythingIsLoaded) {
  Saved saved("different");
  auto state = state_of(saved.net);
  state["body.weight"] = torch::zeros({4, 5});
  state["norm.num_batches_tracked"] = torch::zeros({});
  state["words.weight"] = state["words.weight"].to(at::kDouble);
  state.erase("body.bias");
  state.erase("norm.bias");
  state["extra"] = state["norm.weights"] = torch::zeros(1);
  for (auto& [name, tensor] : state) tensor = tensor.clone();
  accelerate::save_safetensors(saved.path / "model.safetensors", state);
  auto net = empty_net();
  const auto check = accelerate::check_state_dict(net, saved.path);
  EXPECT_THAT(check.missing, ElementsAre("body.bias", "norm.bias"));
  EXPECT_THAT(check.unexpected, ElementsAre("extra", "norm.weights"));
  EXPECT_THAT(check.mismatched,
              ElementsAre("body.weight: [4, 5] float32 in the checkpoint, [4, 4] float32 in the model",
                          "norm.num_batches_tracked: [] float32 in the checkpoint, [] int64 in the model"));
  EXPECT_THAT(check.converted,
              ElementsAre("words.weight: [10, 4] float64 in the checkpoint, [10, 4] float32 in the model"));
  EXPECT_FALSE(check.fits());
  const auto message = message_of([&] { load_checkpoint_in_model(net, saved.path); });
  for (const char* part :
       {"Nothing was loaded", "body.bias", "norm.bias", "extra", "norm.weights", "[4, 5] float32", "[] int64"})
    EXPECT_THAT(message, HasSubstr(part));
  EXPECT_TRUE(accelerate::is_deferred(net->words->weight));
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, saved.path, {.strict = false}); }),
              AllOf(HasSubstr("[4, 5] float32"), testing::Not(HasSubstr("extra"))));
}

TEST(LoadCheckpoint, NotStrictLoadsWhatIsInBoth) {
  Saved saved("lenient");
  accelerate::save_safetensors(saved.path / "model.safetensors",
                               {{"body.weight", torch::ones({4, 4})}, {"more", torch::ones(1)}});
  auto net = empty_net();
  load_checkpoint_in_model(net, saved.path, {.strict = false});
  EXPECT_TRUE(torch::equal(net->body->weight, torch::ones({4, 4})));
  EXPECT_TRUE(accelerate::is_deferred(net->body->bias));
}

TEST(LoadCheckpoint, BadMapsAndFoldersAreErrors) {
  Saved saved("bad");
  auto net = empty_net();
  const auto error = [&](const accelerate::DeviceMap& map) {
    return message_of([&] { load_checkpoint_in_model(net, saved.path, {.device_map = map}); });
  };
  EXPECT_THAT(error({{"", "cpu"}, {"bodi", "disk"}, {"tail", 0}}),
              AllOf(HasSubstr("bodi (did you mean 'body'?)"), HasSubstr("tail")));
  EXPECT_THAT(error({{"words", "cpu"}, {"norm", "cpu"}}),
              AllOf(HasSubstr("no place for\n  body.weight\n  body.bias"), testing::Not(HasSubstr("head.weight"))));
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, folder("none")); }),
              HasSubstr("neither model.safetensors nor pytorch_model.bin, and 0 files"));
  std::ofstream(saved.path / "x.index.json")
      << R"({"weight_map": {"body.weight": "model.safetensors", "gone": "model.safetensors", )"
         R"("lost": "model.safetensors"}})";
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, saved.path / "x.index.json"); }),
              HasSubstr("gone (in model.safetensors), lost (in model.safetensors)"));
  std::ofstream(saved.path / "x.index.json") << R"({"weight_map": {"body.weight": "../model.safetensors"}})";
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, saved.path / "x.index.json"); }),
              HasSubstr("not the plain name of a file"));
  EXPECT_TRUE(accelerate::is_deferred(net->body->weight));
}

/// As accelerate 1.15 infers them: with a dropout, which has no weights and is no module here.
TEST(LoadCheckpoint, KeysOfPythonsMapsForModulesWithoutWeightsArePassedOver) {
  Saved saved("python_map");
  auto net = empty_net();
  const auto load = [&](accelerate::DeviceMap map) {
    return support::warnings_of([&] { load_checkpoint_in_model(net, saved.path, {.device_map = std::move(map)}); });
  };
  accelerate::DeviceMap map;
  for (const auto& child : net->named_children()) map.insert_or_assign(child.key(), "cpu");
  EXPECT_THAT(load(map), testing::Not(HasSubstr("device map")));
  map.insert_or_assign("drop", "cpu");
  EXPECT_THAT(load(map), testing::AllOf(HasSubstr("are passed over"), HasSubstr("\n  drop")));
  EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected));
  EXPECT_THAT(load({{"", "cpu"}, {"body.drop", "cpu"}}), HasSubstr("are passed over")) << "where what holds it is, too";
  // Nothing says so where it is to be elsewhere than what holds it, or where something has no place.
  for (auto wrong : {accelerate::DeviceMap{{"", "cpu"}, {"bodx", "disk"}}, accelerate::DeviceMap{{"bodx", "cpu"}}})
    EXPECT_THAT(message_of([&] { load(wrong); }), HasSubstr("bodx (did you mean 'body'?)"));
}

TEST(LoadCheckpoint, AnIndexMayBeTheMapAlone) {
  Saved saved("plain_index");
  fs::rename(saved.path / "model.safetensors", saved.path / "first.safetensors");
  std::string index;
  for (const auto& [name, value] : state_of(saved.net))
    index += (index.empty() ? "{\"" : ", \"") + name + "\": \"first.safetensors\"";
  std::ofstream(saved.path / "index.json") << index << "}";
  for (const auto& path : {saved.path / "index.json", saved.path}) {
    auto net = empty_net();
    load_checkpoint_in_model(net, path);
    EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected)) << path;
  }
}

TEST(LoadCheckpoint, AnIndexWithTwoFilesForATensorIsRefused) {
  Saved saved("two_files");
  std::ofstream(saved.path / "twice.index.json")
      << R"({"weight_map": {"a": "model.safetensors", "a": "other.safetensors"}})";
  auto net = empty_net();
  EXPECT_THAT(message_of([&] { load_checkpoint_in_model(net, saved.path / "twice.index.json"); }),
              HasSubstr("has the key \"a\" twice"));
}

// As on the hub: the same weights as safetensors and pickled, each with its index.
TEST(LoadCheckpoint, OfTwoIndexesThatOfSafetensorsCounts) {
  Saved saved("two_indexes");
  fs::rename(saved.path / "model.safetensors", saved.path / "model-00001-of-00001.safetensors");
  std::string map;
  for (const auto& [name, value] : state_of(saved.net))
    map += (map.empty() ? "\"" : ", \"") + name + "\": \"model-00001-of-00001.safetensors\"";
  std::ofstream(saved.path / "model.safetensors.index.json") << R"({"weight_map": {)" << map << "}}";
  std::ofstream(saved.path / "pytorch_model.bin.index.json")
      << R"({"weight_map": {"body.weight": "pytorch_model-00001-of-00001.bin"}})";
  auto net = empty_net();
  load_checkpoint_in_model(net, saved.path);
  EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected));
}

TEST(LoadCheckpoint, AMapFromInferenceCanBeUsedAsItIs) {
  Saved saved("inferred");
  auto net = empty_net();
  const auto map = accelerate::infer_auto_device_map(net, {.max_memory = accelerate::MaxMemory{{"cpu", 300}}});
  EXPECT_GT(map.size(), 1U);
  load_checkpoint_in_model(net, saved.path, {.device_map = map});
  EXPECT_TRUE(torch::equal(output(net, saved.input), saved.expected));
}

}  // namespace
