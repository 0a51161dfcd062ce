// convert_files(): each format in and out, what ends early, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/file.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include <torch/torch.h>

#include "accelerate/bigmodel/convert_files.hpp"
#include "accelerate/bigmodel/loading.hpp"
#include "accelerate/checkpoint.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "dcp_test_support.hpp"
#include "formats/gguf_writer.hpp"
#include "formats/inspect/inspect.hpp"
#include "formats/torch_archive.hpp"
#include "message_of.hpp"
#include "scratch.hpp"
#include "utils/fd.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::CheckpointError;
using accelerate::ConfigError;
using accelerate::convert_files;
using accelerate::ConvertFilesOptions;
using support::message_of;
using support::scratch;
using testing::ElementsAre;
using testing::HasSubstr;
using Weights = std::map<std::string, at::Tensor>;

/// Floats, 16 bits, whole numbers, a scalar and a tensor without elements.
Weights some_weights() {
  torch::manual_seed(4);
  return {{"a.weight", torch::randn({3, 4})},
          {"b.bias", torch::randn({5}).to(torch::kBFloat16)},
          {"c.steps", torch::arange(7)},
          {"d.scale", torch::randn({})},
          {"e.none", torch::zeros({0, 2})}};
}

void expect_equal(const Weights& found, const Weights& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_EQ(found.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(found.at(name).equal(tensor)) << name;
  }
}
Weights loaded(const fs::path& path) {
  const bool is_archive = path.extension() == ".bin" || path.extension() == ".pt";
  return is_archive ? accelerate::formats::load_archive(path) : accelerate::load_checkpoint_files(path);
}
size_t entries(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(ConvertFiles, EachFormatInAndOut) {
  const auto weights = some_weights();
  accelerate::save_safetensors(scratch("in.safetensors"), weights);
  const auto made = convert_files(scratch("in.safetensors"), scratch("one.bin"));
  EXPECT_EQ(made.tensors, 5);
  EXPECT_EQ(made.bytes, 3 * 4 * 4 + 5 * 2 + 7 * 8 + 4);
  EXPECT_THAT(made.files, ElementsAre(scratch("one.bin")));
  expect_equal(loaded(scratch("one.bin")), weights);

  const auto shards = convert_files(scratch("one.bin"), scratch("shards"), {.max_shard_size = "0.06KB"});
  EXPECT_EQ(shards.files.size(), 3) << "two files of weights and their index";
  expect_equal(loaded(scratch("shards")), weights);
  const auto index = nlohmann::json::parse(support::text_of(scratch("shards") / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], made.bytes);

  convert_files(scratch("shards"), scratch("bins"), {.to = "torch", .max_shard_size = "0.06KB"});
  expect_equal(loaded(scratch("bins")), weights);
  EXPECT_TRUE(fs::exists(scratch("bins") / "pytorch_model.bin.index.json"));

  convert_files(scratch("bins") / "pytorch_model.bin.index.json", scratch("dcp"),
                {.to = "dcp", .max_shard_size = "0.06KB"});
  EXPECT_EQ(entries(scratch("dcp")), 3) << "a file of each part, and the metadata";
  EXPECT_THAT(accelerate::formats::inspect(scratch("dcp"), {.verify = true}).damage, testing::IsEmpty());
  convert_files(scratch("dcp"), scratch("again.safetensors"));
  expect_equal(loaded(scratch("again.safetensors")), weights);
}

TEST(ConvertFiles, DtypesOfFloatsAlone) {
  const auto weights = some_weights();
  accelerate::save_safetensors(scratch("in.safetensors"), weights);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto out = scratch(std::string(c10::toString(dtype)) + ".safetensors");
    convert_files(scratch("in.safetensors"), out, {.dtype = dtype});
    auto expected = weights;
    for (auto& [name, tensor] : expected)
      if (tensor.is_floating_point()) tensor = tensor.to(dtype);
    expect_equal(loaded(out), expected);
  }
  accelerate::save_safetensors(scratch("large.safetensors"),
                               {{"big", torch::full({2}, 7e4)}, {"inf", torch::full({2}, INFINITY)}});
  EXPECT_THAT(message_of<CheckpointError>(
                  [&] { convert_files(scratch("large.safetensors"), scratch("large.bin"), {.dtype = at::kHalf}); }),
              HasSubstr("'big' has numbers beyond fp16"));
  EXPECT_FALSE(fs::exists(scratch("large.bin")));
  accelerate::save_safetensors(scratch("inf.safetensors"), {{"inf", torch::full({2}, INFINITY)}});
  convert_files(scratch("inf.safetensors"), scratch("inf.bin"), {.dtype = at::kHalf});
  EXPECT_TRUE(loaded(scratch("inf.bin")).at("inf").isinf().all().item<bool>());
}

TEST(ConvertFiles, ShardsOfFsdp) {
  const auto weights = some_weights();
  std::vector<dcp_test::Shared> state;
  for (const auto& [name, tensor] : weights) state.push_back({"model." + name, tensor, tensor.dim() > 0 ? 0 : -1});
  dcp_test::save(scratch("run") / "pytorch_model_fsdp_0", state, 3);
  convert_files(scratch("run"), scratch("whole"));
  expect_equal(loaded(scratch("whole")), weights);
  dcp_test::save(scratch("optimizer"), {{"groups.0.lr", torch::zeros({})}}, 1);
  EXPECT_THAT(message_of<ConfigError>([&] { convert_files(scratch("optimizer"), scratch("x")); }),
              HasSubstr("is no tensor in a flat list"));
  fs::remove(scratch("run") / "pytorch_model_fsdp_0" / "__1_0.distcp");
  EXPECT_THAT(message_of<CheckpointError>([&] { convert_files(scratch("run"), scratch("y")); }),
              HasSubstr("__1_0.distcp"));
  EXPECT_FALSE(fs::exists(scratch("y")));
  EXPECT_FALSE(fs::exists(accelerate::unfinished_conversion(scratch("y")))) << "nothing is whole, nothing stays";
}

c10::IValue dict_of(std::initializer_list<std::pair<const char*, c10::IValue>> items) {
  c10::impl::GenericDict made(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : items) made.insert(key, value);
  return made;
}
c10::IValue list_of(std::initializer_list<c10::IValue> items) {
  c10::impl::GenericList made(c10::AnyType::get());
  for (const auto& item : items) made.push_back(item);
  return made;
}

/// ZeRO's stage 2 of two ranks, whose masters are `masters`, 4 elements.
void save_zero(const fs::path& tag, const at::Tensor& masters) {
  fs::create_directories(tag);
  accelerate::checkpointing::save_object(dict_of({{"module", dict_of({{"w", masters.to(torch::kHalf).view({2, 2})}})},
                                                  {"buffer_names", list_of({})},
                                                  {"param_shapes", list_of({dict_of({{"w", list_of({2, 2})}})})},
                                                  {"dp_world_size", 2},
                                                  {"global_steps", 3}}),
                                         tag / "mp_rank_00_model_states.pt");
  for (int64_t rank = 0; rank < 2; ++rank)
    accelerate::checkpointing::save_object(
        dict_of(
            {{"optimizer_state_dict",
              dict_of({{"zero_stage", 2},
                       {"partition_count", list_of({2})},
                       {"single_partition_of_fp32_groups", list_of({masters.narrow(0, 2 * rank, 2).clone()})},
                       {"base_optimizer_state", dict_of({{"state", dict_of({})}, {"param_groups", list_of({})}})}})}}),
        tag / ("zero_pp_rank_" + std::to_string(rank) + "_mp_rank_00_optim_states.pt"));
}

TEST(ConvertFiles, DeepSpeedsFolders) {
  const at::Tensor masters = torch::randn({4}), older = torch::randn({4});
  save_zero(scratch("ds") / "step2", masters);
  save_zero(scratch("ds") / "step1", older);
  support::write(scratch("ds") / "latest", "step2");
  convert_files(scratch("ds"), scratch("latest.safetensors"));
  expect_equal(loaded(scratch("latest.safetensors")), {{"w", masters.view({2, 2})}});
  convert_files(scratch("ds"), scratch("older.safetensors"), {.tag = "step1"});
  expect_equal(loaded(scratch("older.safetensors")), {{"w", older.view({2, 2})}});
}

TEST(ConvertFiles, GgufIsDecoded) {
  accelerate::formats::GgufOutline outline;
  outline.entries = {accelerate::formats::gguf_entry("general.architecture", std::string("nobody"))};
  outline.tensors = {{"w", {2, 32}, accelerate::formats::find_gguf_encoding(8)}};  // q8_0
  std::string blocks;
  const at::Half scale(0.5F);
  for (int block = 0; block < 2; ++block) {
    blocks.append(reinterpret_cast<const char*>(&scale), 2);
    for (int i = 0; i < 32; ++i) blocks += static_cast<char>(i - 16);
  }
  accelerate::formats::GgufWriter writer("test", scratch("in.gguf"), outline);
  writer.write(blocks);
  writer.finish();
  const auto values = (torch::arange(32).to(torch::kFloat) - 16).mul(0.5).repeat({2, 1});
  convert_files(scratch("in.gguf"), scratch("numbers"));
  expect_equal(loaded(scratch("numbers")), {{"w", values}});
  convert_files(scratch("in.gguf"), scratch("numbers.pt"), {.dtype = at::kBFloat16});
  expect_equal(loaded(scratch("numbers.pt")), {{"w", values.to(torch::kBFloat16)}});
}

/// Stops before this tensor. @return how many were begun
int64_t stop_at(const fs::path& to, ConvertFilesOptions options, int64_t most) {
  int64_t begun = 0;
  options.on_progress = [&](int64_t, int64_t) {
    if (begun == most) throw std::runtime_error("stopped");
    ++begun;
  };
  try {
    convert_files(scratch("in.safetensors"), to, options);
  } catch (const std::runtime_error&) {
  }
  return begun;
}

TEST(ConvertFiles, WhatIsWholeIsKept) {
  Weights weights;
  for (const char* name : {"a", "b", "c", "d", "e"}) weights.emplace(name, torch::randn({8}));
  accelerate::save_safetensors(scratch("in.safetensors"), weights);
  const fs::path out = scratch("out"), work = accelerate::unfinished_conversion(out);
  const ConvertFilesOptions small{.max_shard_size = "0.032KB"};  // a file for each
  const auto half_done = [&] {
    fs::remove_all(out), fs::remove_all(work);
    stop_at(out, small, 3);
    EXPECT_FALSE(fs::exists(out));
    ASSERT_TRUE(fs::exists(work / "model-00003-of-00005.safetensors"));
    EXPECT_FALSE(fs::exists(work / "model-00004-of-00005.safetensors"));
  };
  const auto goes_on = [&](ConvertFilesOptions options) {
    std::vector<int64_t> done;
    options.on_progress = [&](int64_t before, int64_t) { done.push_back(before); };
    const auto made = convert_files(scratch("in.safetensors"), out, options);
    EXPECT_EQ(static_cast<int64_t>(done.size()), 5 - made.kept) << "kept ones are not read";
    if (!options.dtype) expect_equal(loaded(out), weights);
    EXPECT_EQ(entries(out), options.dtype ? 4U : 6U) << "files and their index, nothing else";
    EXPECT_FALSE(fs::exists(work));
    return made.kept;
  };
  half_done();
  EXPECT_EQ(goes_on(small), 3);
  half_done();
  auto other = small;
  other.dtype = at::kHalf;
  EXPECT_EQ(goes_on(other), 0) << "of another dtype";
  half_done();
  fs::resize_file(work / "model-00002-of-00005.safetensors", 40);
  EXPECT_EQ(goes_on(small), 2) << "one was damaged";
  half_done();
  for (auto& [name, tensor] : weights) tensor = torch::randn({8});
  accelerate::save_safetensors(scratch("in.safetensors"), weights);
  EXPECT_EQ(goes_on(small), 0) << "of another input";
  // A result within what is read.
  fs::create_directories(scratch("model"));
  fs::rename(scratch("in.safetensors"), scratch("model") / "model.safetensors");
  auto inner = small;
  int64_t begun = 0;
  inner.on_progress = [&](int64_t, int64_t) {
    if (begun++ == 3) throw std::runtime_error("stopped");
  };
  EXPECT_THROW(convert_files(scratch("model"), scratch("model") / "out", inner), std::runtime_error);
  EXPECT_EQ(convert_files(scratch("model"), scratch("model") / "out", small).kept, 3);
}

TEST(ConvertFiles, NothingIsLeftOfAFileThatEndsEarly) {
  accelerate::save_safetensors(scratch("in.safetensors"), some_weights());
  const auto before = entries(support::scratch_dir());
  for (const char* name : {"out.safetensors", "out.bin", "folder"}) {
    EXPECT_EQ(stop_at(scratch(name), {}, 2), 2);
    EXPECT_EQ(entries(support::scratch_dir()), before) << name;
  }
}

TEST(ConvertFiles, WhatIsThereIsReplacedWhereThatIsAllowed) {
  accelerate::save_safetensors(scratch("in.safetensors"), {{"new", torch::ones({2})}});
  accelerate::save_safetensors(scratch("old.safetensors"), {{"old", torch::ones({2})}});
  fs::create_directories(scratch("folder"));
  accelerate::save_safetensors(scratch("folder") / "model.safetensors", {{"old", torch::ones({2})}});
  for (const char* name : {"old.safetensors", "folder"}) {
    EXPECT_THAT(message_of<ConfigError>([&] { convert_files(scratch("in.safetensors"), scratch(name)); }),
                HasSubstr("exists. Choose another place"));
    EXPECT_EQ(loaded(scratch(name)).begin()->first, "old");
    convert_files(scratch("in.safetensors"), scratch(name), {.overwrite = true});
    EXPECT_EQ(loaded(scratch(name)).begin()->first, "new");
  }
  support::write(scratch("folder") / "thesis.txt", "all of it");
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { convert_files(scratch("in.safetensors"), scratch("folder"), {.overwrite = true}); }),
              HasSubstr("has 'thesis.txt', which is no file of weights"));
  EXPECT_TRUE(fs::exists(scratch("folder") / "thesis.txt"));
}

TEST(ConvertFiles, WhatCantBeIsRefused) {
  accelerate::save_safetensors(scratch("in.safetensors"), {{"w", torch::ones({2})}});
  const auto refusal = [&](const fs::path& to, const ConvertFilesOptions& options) {
    return message_of<ConfigError>([&] { convert_files(scratch("in.safetensors"), to, options); });
  };
  EXPECT_THAT(refusal(scratch("x.bin"), {.max_shard_size = "1GB"}), HasSubstr("will be one file, expected a folder"));
  EXPECT_THAT(refusal(scratch("x.bin"), {.to = "safetensors"}),
              HasSubstr("expected a name that ends so (.safetensors"));
  EXPECT_THAT(refusal(scratch("x"), {.to = "gguf"}), HasSubstr("expected a name that ends so (.gguf)"));
  EXPECT_THAT(refusal(scratch("x"), {.to = "onnx"}), HasSubstr("expected safetensors, torch, gguf or dcp"));
  EXPECT_THAT(refusal(scratch("x"), {.dtype = at::kLong}), HasSubstr("expected float32, float64, float16 or bfloat16"));
  EXPECT_THAT(refusal(scratch("x"), {.tag = "step1"}), HasSubstr("expected DeepSpeed's folder"));
  EXPECT_THAT(refusal(scratch("x.gguf"), {}), HasSubstr("is made of a Hugging Face folder"));
  EXPECT_THAT(refusal(scratch("in.safetensors"), {.overwrite = true}), HasSubstr("expected two places"));
  EXPECT_THAT(message_of<CheckpointError>([&] { convert_files(scratch("nothing"), scratch("x")); }),
              HasSubstr("does not exist"));
  const auto work = accelerate::unfinished_conversion(scratch("x"));
  fs::create_directories(work);
  {
    const accelerate::Fd other(::open(work.c_str(), O_RDONLY | O_DIRECTORY));
    ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
    EXPECT_THAT(refusal(scratch("x"), {}), HasSubstr("another process is writing into"));
  }
  fs::remove(work);
  fs::resize_file(scratch("in.safetensors"), fs::file_size(scratch("in.safetensors")) - 1);
  EXPECT_THAT(message_of<CheckpointError>([&] { convert_files(scratch("in.safetensors"), scratch("x")); }),
              HasSubstr("in.safetensors"));
  EXPECT_FALSE(fs::exists(scratch("x")));
}

}  // namespace
