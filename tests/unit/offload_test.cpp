// The offload folder: against Python both ways, and folders that are not right. Bytes are checked by the conformance
// cases.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "accelerate/bigmodel/offload.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "accelerate/utils/error.hpp"
#include "bigmodel_support.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::OffloadedWeightsLoader;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

fs::path folder_of(const std::string& name) {
  const fs::path path = fs::path(support::scratch_dir()) / ("offload_" + name);
  fs::remove_all(path);
  fs::create_directories(path);
  return path;
}

void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }

/// The tensors of offload_peer.py.
accelerate::NamedTensors tensors() {
  const std::pair<const char*, at::ScalarType> dtypes[] = {{"float32", at::kFloat},
                                                           {"float16", at::kHalf},
                                                           {"bfloat16", at::kBFloat16},
                                                           {"float64", at::kDouble},
                                                           {"int64", at::kLong},
                                                           {"int32", at::kInt},
                                                           {"int16", at::kShort},
                                                           {"int8", at::kChar},
                                                           {"uint8", at::kByte},
                                                           {"bool", at::kBool},
                                                           {"float8_e4m3fn", at::kFloat8_e4m3fn},
                                                           {"float8_e5m2", at::kFloat8_e5m2}};
  accelerate::NamedTensors result;
  for (const auto& [name, dtype] : dtypes)
    result.emplace_back("layer." + std::string(name), torch::arange(6).reshape({2, 3}).to(dtype));
  result.emplace_back("scalar", torch::tensor(2.5F));
  result.emplace_back("empty", torch::zeros({0, 3}));
  result.emplace_back("größe", torch::ones(2));
  return result;
}

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}

TEST(OffloadFolder, PythonReadsOurs) {
  SKIP_WITHOUT_PYTHON();
  const auto path = folder_of("ours");
  accelerate::offload_state_dict(path, tensors());
  const auto result = support::run_python("tests/unit/offload_peer.py", {"check", path.string()});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

TEST(OffloadFolder, WeReadPythonsAndItsEntriesForSafetensorsFiles) {
  SKIP_WITHOUT_PYTHON();
  const auto path = folder_of("theirs");
  const auto result = support::run_python("tests/unit/offload_peer.py", {"write", path.string()});
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const OffloadedWeightsLoader loader({.save_folder = path});
  EXPECT_EQ(loader.size(), static_cast<int64_t>(tensors().size()));
  for (const auto& [name, expected] : tensors()) EXPECT_TRUE(same(loader[name], expected)) << name;
  accelerate::save_offload_index(
      {{"moved", {.dtype = "float32", .safetensors_file = path / "shard.safetensors", .weight_name = "inner.name"}}},
      path);
  EXPECT_TRUE(torch::equal(OffloadedWeightsLoader({.save_folder = path})["moved"], torch::arange(4, at::kFloat)));
}

TEST(OffloadFolder, IsWrittenFromAnyKindOfStateDict) {
  const auto path = folder_of("kinds");
  torch::nn::Linear linear(3, 2);
  accelerate::offload_state_dict(path / "named", linear->named_parameters());
  accelerate::offload_state_dict(path / "map",
                                 std::map<std::string, at::Tensor>{{"weight", linear->weight}, {"bias", linear->bias}});
  for (const char* kind : {"named", "map"}) {
    const OffloadedWeightsLoader loader({.save_folder = path / kind});
    EXPECT_EQ(loader.size(), 2) << kind;
    EXPECT_TRUE(same(loader["weight"], linear->weight.detach())) << kind;
  }
}

TEST(OffloadFolder, WhatIsInMemoryGoesFirst) {
  const auto path = folder_of("priority");
  accelerate::offload_state_dict(path, {{"a", torch::zeros(2)}, {"b", torch::ones(2)}});
  const OffloadedWeightsLoader loader(
      {.state_dict = {{"b", torch::full(2, 7)}, {"c", torch::full(2, 8)}}, .save_folder = path});
  EXPECT_THAT(loader.names(), ElementsAre("b", "c", "a"));
  EXPECT_TRUE(torch::equal(loader["b"], torch::full(2, 7)));
  EXPECT_TRUE(loader.contains("a"));
  EXPECT_FALSE(loader.contains("d"));
}

TEST(OffloadFolder, AnIndexIsAddedToAndAWeightReplaced) {
  const auto path = folder_of("added");
  accelerate::offload_state_dict(path, {{"a", torch::zeros(2)}, {"b", torch::zeros(2)}});
  accelerate::offload_state_dict(path, {{"c", torch::ones({2, 2})}, {"a", torch::ones(3, at::kHalf)}});
  const OffloadedWeightsLoader loader({.save_folder = path});
  EXPECT_THAT(loader.names(), ElementsAre("a", "b", "c"));
  EXPECT_TRUE(same(loader["a"], torch::ones(3, at::kHalf)));
}

TEST(OffloadFolder, WritingToALoadedWeightLeavesTheFileAlone) {
  const auto path = folder_of("private");
  accelerate::offload_state_dict(path, {{"a", torch::zeros(2)}});
  const OffloadedWeightsLoader loader({.save_folder = path});
  loader["a"].fill_(3);
  EXPECT_TRUE(torch::equal(loader["a"], torch::zeros(2)));
}

TEST(OffloadFolder, StridedWeightsLieRowAfterRow) {
  const auto path = folder_of("strided");
  const auto values = torch::arange(6.0F).reshape({2, 3}).t();
  accelerate::offload_state_dict(path, {{"a", values}});
  EXPECT_TRUE(torch::equal(OffloadedWeightsLoader({.save_folder = path})["a"], values));
}

TEST(OffloadFolder, SaysWhatIsWrong) {
  const auto path = folder_of("wrong");
  const auto offload = [&](const std::string& name, const at::Tensor& tensor) {
    return message_of([&] { accelerate::offload_weight(tensor, name, path); });
  };
  EXPECT_THAT(offload("a", torch::empty(2, torch::TensorOptions().device(at::kMeta))), HasSubstr("'a' has no data"));
  EXPECT_THAT(offload("../a", torch::zeros(1)), HasSubstr("can't be the name of a weight"));
  EXPECT_THAT(offload("a", torch::zeros({2, 2}).to_sparse()), HasSubstr("sparse"));
  EXPECT_THAT(message_of([] { accelerate::offload_weight(torch::zeros(1), "a", "/nonexistent"); }),
              HasSubstr("/nonexistent/a.dat"));
  EXPECT_THAT(message_of([] { OffloadedWeightsLoader loader({}); }), HasSubstr("nothing to load from"));
  EXPECT_THAT(message_of([&] { OffloadedWeightsLoader loader({.save_folder = path}); }), HasSubstr("can't open it"));

  accelerate::offload_state_dict(path, {{"weight", torch::zeros(4)}});
  const OffloadedWeightsLoader loader({.save_folder = path});
  EXPECT_THAT(message_of([&] { loader["weigth"]; }), HasSubstr("Did you mean 'weight'"));
  fs::resize_file(path / "weight.dat", 15);
  EXPECT_THAT(message_of([&] { loader["weight"]; }), AllOf(HasSubstr("has 15 bytes"), HasSubstr("need 16")));
  fs::remove(path / "weight.dat");
  EXPECT_THAT(message_of([&] { loader["weight"]; }), HasSubstr("can't open"));

  const auto index = [&](const std::string& text) {
    write(path / "index.json", text);
    return message_of([&] { OffloadedWeightsLoader({.save_folder = path})["a"]; });
  };
  EXPECT_THAT(index("{\"a\": "), HasSubstr("not a JSON object"));
  EXPECT_THAT(index(R"({"a": 1})"), HasSubstr("expected an object"));
  EXPECT_THAT(index(R"({"a": {"dtype": "float32"}})"), HasSubstr("expected \"dtype\" and \"shape\""));
  EXPECT_THAT(index(R"({"a": {"dtype": "float32", "shape": [-1]}})"), HasSubstr("0 or more"));
  EXPECT_THAT(index(R"({"a": {"dtype": 3, "shape": []}})"), HasSubstr("expected a text"));
  write(path / "a.dat", std::string(16, '\0'));
  EXPECT_THAT(index(R"({"a": {"dtype": "float33", "shape": [2]}})"), HasSubstr("dtype 'float33'"));
  EXPECT_THAT(index(R"({"a": {"dtype": "float32", "shape": [4611686018427387904, 4]}})"),
              HasSubstr("more bytes than there are numbers"));
  EXPECT_THAT(index(R"({"a": {"dtype": "float32", "shape": [4611686018427387904, 4611686018427387904, 0]}})"),
              HasSubstr("more bytes than there are numbers"));
  EXPECT_THAT(index(R"({"a": {"safetensors_file": "/nonexistent.safetensors"}})"),
              AllOf(HasSubstr("/nonexistent.safetensors"), HasSubstr("neither in the folder")));
  EXPECT_THAT(index(R"({"a": {"safetensors_file": ")" + (path / "absent").string() + "\"}}"),
              HasSubstr("No such file"));
  fs::remove(path / "a.dat");
  fs::create_symlink("/etc/passwd", path / "a.dat");
  EXPECT_THAT(index(R"({"a": {"dtype": "uint8", "shape": [2]}})"),
              AllOf(HasSubstr("leads to '/etc/passwd'"), HasSubstr("neither in the folder")));
}

}  // namespace
