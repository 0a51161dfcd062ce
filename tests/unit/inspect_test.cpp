// What inspect() says of each format, and of what is damaged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include <torch/torch.h>

#include "accelerate/bigmodel/convert_files.hpp"
#include "accelerate/formats/safetensors.hpp"
#include "dcp_test_support.hpp"
#include "formats/checkpoint_manifest.hpp"
#include "formats/gguf_writer.hpp"
#include "formats/inspect/inspect.hpp"
#include "formats/torch_archive.hpp"
#include "python.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace accelerate;
using formats::Inspection;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

fs::path place(const std::string& name) { return fs::path(support::scratch_dir()) / name; }

void write(const fs::path& file, const std::string& bytes) {
  fs::create_directories(file.parent_path());
  std::ofstream(file, std::ios::binary) << bytes;
}
std::string bytes_in(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
/// Turns one bit over, where `text` stands, or in the middle of these bytes.
void flip(const fs::path& file, const std::string& text) {
  auto bytes = bytes_in(file);
  const auto at = bytes.find(text);
  ASSERT_NE(at, std::string::npos);
  bytes[at] ^= 1;
  write(file, bytes);
}
/// The bytes of a float, which no header has by chance.
std::string bytes_of(float value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }
constexpr float kMark = 12345.678F;

c10::IValue dict(std::initializer_list<std::pair<const char*, c10::IValue>> items) {
  c10::impl::GenericDict made(c10::StringType::get(), c10::AnyType::get());
  for (const auto& [key, value] : items) made.insert(key, value);
  return made;
}
c10::IValue list(std::initializer_list<c10::IValue> items) {
  c10::impl::GenericList made(c10::AnyType::get());
  for (const auto& item : items) made.push_back(item);
  return made;
}
void save(const fs::path& file, const c10::IValue& value) {
  formats::TorchPickle pickle;
  pickle.value(value);
  std::string bytes;
  formats::write_torch_archive(std::move(pickle), [&](std::string_view more) { bytes += more; });
  write(file, bytes);
}

/// "name dtype [sizes] bytes" of all tensors.
std::vector<std::string> rows(const formats::InspectedPart& part) {
  std::vector<std::string> all;
  for (const auto& tensor : part.tensors)
    all.push_back(tensor.name + " " + tensor.dtype + " " + formats::to_string(tensor.shape) + " " +
                  std::to_string(tensor.bytes));
  return all;
}
std::string refusal(const fs::path& path) {
  try {
    formats::inspect(path);
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "nothing was refused";
}

void save_weights(const fs::path& file, const std::map<std::string, at::Tensor>& tensors) {
  fs::create_directories(file.parent_path());
  save_safetensors(file, tensors);
}

TEST(Inspect, Safetensors) {
  const auto file = place("a.safetensors");
  save_weights(file, {{"w", torch::zeros({2, 3})}, {"half", torch::zeros({4}, torch::kHalf)}});
  const auto found = formats::inspect(file);
  EXPECT_EQ(found.format, "safetensors");
  ASSERT_THAT(found.parts, SizeIs(1));
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("w float32 [2, 3] 24", "half float16 [4] 8"));
  EXPECT_EQ(found.bytes, static_cast<int64_t>(fs::file_size(file)));
  EXPECT_THAT(found.damage, IsEmpty());
  const auto verified = formats::inspect(file, {.verify = true});
  EXPECT_EQ(verified.checked_bytes, 0);
  EXPECT_EQ(verified.unchecked_bytes, found.bytes) << "the format has no checksums, which is said";
  fs::resize_file(file, fs::file_size(file) - 4);
  EXPECT_THAT(formats::inspect(file).damage, ElementsAre(HasSubstr("a.safetensors")));
}

TEST(Inspect, AnIndexAndItsShards) {
  const auto folder = place("model");
  write(folder / "config.json", "{}");
  save_weights(folder / "one.safetensors", {{"a", torch::zeros({2})}});
  save_weights(folder / "two.safetensors", {{"b", torch::zeros({3})}});
  write(folder / "model.safetensors.index.json",
        R"({"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}})");
  auto found = formats::inspect(folder);
  ASSERT_THAT(found.parts, SizeIs(1)) << "shards are not listed again";
  EXPECT_EQ(found.format, "safetensors, several files");
  EXPECT_EQ(found.files, 3);
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("a float32 [2] 8", "b float32 [3] 12"));
  EXPECT_EQ(found.parts[0].tensors[1].file, "two.safetensors");
  EXPECT_THAT(found.damage, ElementsAre(HasSubstr("'two.safetensors' lacks 1 of the tensors")));
  fs::remove(folder / "one.safetensors");
  found = formats::inspect(folder / "model.safetensors.index.json");
  EXPECT_THAT(found.damage, ElementsAre(HasSubstr("one.safetensors"), HasSubstr("lacks 1")));
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("b float32 [3] 12")) << "what is there is listed";
}

TEST(Inspect, TorchArchives) {
  const auto file = place("optimizer.bin");
  save(file, dict({{"state", dict({{"w", dict({{"exp_avg", torch::full({2, 3}, kMark)}, {"step", 5}})}})},
                   {"param_groups", list({dict({{"lr", 0.1}, {"scale", torch::zeros({}, torch::kDouble)}})})}}));
  auto found = formats::inspect(file, {.verify = true});
  EXPECT_EQ(found.format, "torch archive");
  EXPECT_THAT(rows(found.parts[0]),
              ElementsAre("state.w.exp_avg float32 [2, 3] 24", "param_groups.0.scale float64 [] 8"));
  EXPECT_EQ(found.parts[0].others, 2);
  EXPECT_GT(found.checked_bytes, 32);
  EXPECT_EQ(found.unchecked_bytes, 0);
  EXPECT_THAT(found.damage, IsEmpty());

  const auto bytes = bytes_in(file);
  flip(file, bytes_of(kMark));
  EXPECT_THAT(formats::inspect(file).damage, IsEmpty()) << "headers are as they were";
  found = formats::inspect(file, {.verify = true});
  EXPECT_THAT(found.damage, ElementsAre(HasSubstr("the record 'data/0' (bytes ")));
  write(file, bytes.substr(0, bytes.size() / 2));
  EXPECT_THAT(formats::inspect(file).damage, ElementsAre(HasSubstr("no directory of a zip at its end")));
  write(file, "");
  EXPECT_THAT(formats::inspect(file).damage, ElementsAre(HasSubstr("It is empty")));
}

TEST(Inspect, Gguf) {
  const auto file = place("a.gguf");
  formats::GgufOutline outline;
  outline.entries = {formats::gguf_entry("general.architecture", std::string("llama"))};
  outline.tensors = {{"x", {2, 32}, formats::find_gguf_encoding(8)}, {"y", {3}, formats::find_gguf_encoding(0)}};
  formats::GgufWriter writer("test", file, outline);
  for (const auto& tensor : outline.tensors) writer.write(std::string(static_cast<size_t>(tensor.bytes()), '\1'));
  writer.finish();
  const auto found = formats::inspect(file);
  EXPECT_EQ(found.format, "GGUF (llama)");
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("x Q8_0 [2, 32] 68", "y F32 [3] 12"));
  fs::resize_file(file, fs::file_size(file) - 32);
  EXPECT_THAT(formats::inspect(file).damage, ElementsAre(HasSubstr("truncated")));
}

TEST(Inspect, DistributedCheckpoints) {
  const auto folder = place("dcp");
  const std::vector<dcp_test::Shared> state = {{"model.w", torch::full({4, 3}, kMark)},
                                               {"model.b", torch::zeros({2}, torch::kBFloat16), -1}};
  dcp_test::save(folder, state, 2);
  auto found = formats::inspect(folder, {.verify = true});
  EXPECT_EQ(found.format, "distributed checkpoint");
  EXPECT_EQ(found.files, 3);
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("model.w float32 [4, 3] 48", "model.b bfloat16 [2] 4"));
  EXPECT_EQ(found.parts[0].tensors[0].pieces, 2);
  EXPECT_EQ(found.parts[0].tensors[1].file, "__0_0.distcp");
  EXPECT_GT(found.checked_bytes, 52);
  EXPECT_THAT(found.damage, IsEmpty());

  const auto second = bytes_in(folder / "__1_0.distcp");
  flip(folder / "__1_0.distcp", bytes_of(kMark));
  EXPECT_THAT(formats::inspect(folder).damage, IsEmpty());
  EXPECT_THAT(formats::inspect(folder, {.verify = true}).damage,
              ElementsAre(testing::AllOf(HasSubstr("item 'model.w' in '__1_0.distcp'"), HasSubstr("is damaged"))));
  write(folder / "__1_0.distcp", second.substr(0, second.size() - 8));
  EXPECT_THAT(formats::inspect(folder).damage, ElementsAre(HasSubstr("It is truncated")));
  fs::remove(folder / "__1_0.distcp");
  EXPECT_THAT(formats::inspect(folder).damage, ElementsAre(HasSubstr("__1_0.distcp")));
  fs::remove(folder / ".metadata");
  EXPECT_THAT(formats::inspect(folder).damage, ElementsAre(HasSubstr("the save did not finish")));
}

/// Stage 2's files of two ranks, as far as inspect() looks.
void save_deepspeed(const fs::path& tag) {
  save(tag / "mp_rank_00_model_states.pt",
       dict({{"module", dict({{"w", torch::zeros({4})}})}, {"global_steps", 30}, {"dp_world_size", 2}}));
  for (const char* rank : {"0", "1"})
    save(tag / (std::string("zero_pp_rank_") + rank + "_mp_rank_00_optim_states.pt"),
         dict({{"optimizer_state_dict", dict({{"zero_stage", 2},
                                              {"partition_count", list({2})},
                                              {"single_partition_of_fp32_groups", list({torch::zeros({2})})}})}}));
}

TEST(Inspect, DeepSpeedsFolders) {
  const auto folder = place("deepspeed");
  save_deepspeed(folder / "global_step30");
  save_deepspeed(folder / "global_step20");
  write(folder / "latest", "global_step30\n");
  auto found = formats::inspect(folder);
  EXPECT_EQ(found.format, "DeepSpeed checkpoint");
  EXPECT_EQ(found.layout, "ZeRO stage 2");
  EXPECT_EQ(found.step, 30);
  EXPECT_EQ(found.ranks, 2);
  EXPECT_THAT(found.parts, SizeIs(3)) << "the older tag is another checkpoint";
  EXPECT_THAT(found.notes, ElementsAre(HasSubstr("there are also 'global_step20'")));
  EXPECT_THAT(rows(found.parts[1]),
              ElementsAre("optimizer_state_dict.single_partition_of_fp32_groups.0 float32 [2] 8"));
  EXPECT_THAT(found.damage, IsEmpty());
  fs::remove(folder / "global_step30/zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_THAT(formats::inspect(folder / "global_step30").damage,
              ElementsAre(HasSubstr("the optimizer's files of ranks 1 are missing")));
  write(folder / "latest", "global_step40");
  EXPECT_THAT(formats::inspect(folder).damage, testing::Contains(HasSubstr("'global_step40', which is not there")));
}

TEST(Inspect, UniversalFolders) {
  const auto tag = place("universal");
  save(tag / "mp_rank_00_model_states.pt", dict({{"module", dict({})}, {"global_steps", 3}}));
  save(tag / "zero/optimizer_state.pt", dict({{"zero_stage", 2}}));
  save(tag / "zero/w/fp32.pt", dict({{"param", torch::zeros({2, 2})}, {"cat_dim", 0}}));
  save(tag / "zero/w/exp_avg.pt", dict({{"param", torch::zeros({2, 2})}}));
  auto found = formats::inspect(tag);
  EXPECT_EQ(found.layout, "universal");
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("w.exp_avg float32 [2, 2] 16", "w.fp32 float32 [2, 2] 16"));
  EXPECT_EQ(found.parts[0].files, 3);
  fs::remove(tag / "zero/w/fp32.pt");
  EXPECT_THAT(formats::inspect(tag).damage, ElementsAre(HasSubstr("'w' has no fp32.pt")));
}

TEST(Inspect, OffloadFolders) {
  const auto folder = place("offload");
  write(folder / "index.json", R"({"w": {"dtype": "bfloat16", "shape": [2, 3]}})");
  write(folder / "w.dat", std::string(12, 'x'));
  const auto found = formats::inspect(folder);
  EXPECT_EQ(found.format, "offload folder");
  EXPECT_THAT(rows(found.parts[0]), ElementsAre("w bfloat16 [2, 3] 12"));
  write(folder / "w.dat", std::string(11, 'x'));
  EXPECT_THAT(formats::inspect(folder).damage, ElementsAre(HasSubstr("'w.dat' has 11 bytes, expected 12")));
}

TEST(Inspect, TheListOfACheckpoint) {
  const auto folder = place("checkpoint_3");
  save_weights(folder / "model.safetensors", {{"w", torch::full({2}, kMark)}});
  save(folder / "optimizer.bin", dict({{"state", dict({{"m", torch::full({2}, kMark)}})}}));
  formats::CheckpointManifest manifest{
      .world_size = 2, .layout = "safetensors", .step = 30, .iteration = 3, .accelerate = "1", .libtorch = "2.13"};
  for (const char* name : {"model.safetensors", "optimizer.bin"}) {
    ChecksumsInTurn sums;
    sums.add(bytes_in(folder / name));
    manifest.files[name] = sums.take();
  }
  write(folder / formats::kManifestFile, formats::format_manifest(manifest));
  auto found = formats::inspect(folder, {.verify = true});
  EXPECT_EQ(found.format, "checkpoint of save_state");
  EXPECT_EQ(found.layout, "safetensors");
  EXPECT_EQ(found.step, 30);
  EXPECT_EQ(found.iteration, 3);
  EXPECT_EQ(found.ranks, 2);
  EXPECT_EQ(found.written_by, "accelerate 1, LibTorch 2.13");
  EXPECT_EQ(found.checked_bytes, found.bytes) << "each byte once, by the list";
  EXPECT_THAT(found.damage, IsEmpty());
  EXPECT_THAT(found.notes, IsEmpty());
  save_weights(folder / "later.safetensors", {{"w", torch::zeros({2})}});
  found = formats::inspect(folder, {.verify = true});
  EXPECT_THAT(found.notes, ElementsAre(HasSubstr("'later.safetensors' is not in checkpoint.json")));
  EXPECT_EQ(found.unchecked_bytes, static_cast<int64_t>(fs::file_size(folder / "later.safetensors")));
  fs::remove(folder / "later.safetensors");

  flip(folder / "model.safetensors", bytes_of(kMark));
  EXPECT_THAT(formats::inspect(folder).damage, IsEmpty());
  EXPECT_THAT(formats::inspect(folder, {.verify = true}).damage,
              ElementsAre(testing::AllOf(HasSubstr("model.safetensors: "), HasSubstr("have the checksum"))));
  write(folder / "optimizer.bin", "short");
  EXPECT_THAT(formats::inspect(folder).damage,
              testing::Contains(HasSubstr("'" + (folder / "optimizer.bin").string() + "' has 5 bytes, expected the ")));
  fs::remove(folder / "model.safetensors");
  EXPECT_THAT(formats::inspect(folder).damage, testing::Contains(HasSubstr("model.safetensors: ")));
  flip(folder / formats::kManifestFile, "\"step\"");
  found = formats::inspect(folder);
  EXPECT_THAT(found.damage, testing::Contains(HasSubstr("checkpoint.json")));
}

TEST(Inspect, WhatIsNoCheckpointIsRefused) {
  EXPECT_THAT(refusal(place("nothing")), HasSubstr("does not exist"));
  write(place("notes.txt"), "hello");
  EXPECT_THAT(refusal(place("notes.txt")), HasSubstr("of no format that is known"));
  write(place("empty/readme.md"), "hello");
  EXPECT_THAT(refusal(place("empty")), HasSubstr("holds no tensors of a format that is known"));
  for (const char* name : {"checkpoint_1", "checkpoint_2"})
    save_weights(place("several") / name / "model.safetensors", {{"w", torch::zeros({2})}});
  EXPECT_THAT(refusal(place("several")),
              HasSubstr("several checkpoints, 'checkpoint_1', 'checkpoint_2', expected one"));
}

TEST(Inspect, WhatPythonWrites) {
  SKIP_WITHOUT_PYTHON();
  const auto folder = place("python");
  fs::create_directories(folder);
  const auto ran = support::run_python("tests/unit/inspect_peer.py", {folder.string()});
  ASSERT_EQ(ran.exit_code, 0) << ran.output;
  const auto program = formats::inspect(folder / "model.pt2", {.verify = true});
  EXPECT_EQ(program.format, "torch.export program (.pt2)");
  EXPECT_THAT(rows(program.parts[0]),
              testing::UnorderedElementsAre("0.weight float32 [2, 3] 24", "0.bias float32 [2] 8",
                                            "1.weight float32 [2, 2] 16", "1.bias float32 [2] 8"));
  EXPECT_GT(program.checked_bytes, 40);
  convert_files(folder / "model.pt2", folder / "model.safetensors");
  const auto weights = load_safetensors(folder / "model.safetensors");
  ASSERT_EQ(weights.size(), 4U);
  EXPECT_TRUE(weights.at("1.weight").equal(weights.at("0.weight").narrow(1, 0, 2))) << "a view, with its own strides";
  EXPECT_GT(weights.at("0.bias").abs().max().item<float>(), 0);
  EXPECT_THAT(rows(formats::inspect(folder / "whole.pt").parts[0]),
              ElementsAre("0.weight float32 [2, 3] 24", "0.bias float32 [2] 8", "1.weight float32 [2, 2] 16",
                          "1.bias float32 [2] 8"));
  const auto script = formats::inspect(folder / "script.pt", {.verify = true});
  EXPECT_EQ(script.format, "TorchScript");
  EXPECT_THAT(rows(script.parts[0]), ElementsAre("weight float32 [2, 3] 24", "bias float32 [2] 8"));
  EXPECT_THAT(script.damage, IsEmpty());
  EXPECT_EQ(formats::inspect(folder / "old.bin").format, "torch archive (before PyTorch 1.6)");
  const auto without = formats::inspect(folder / "without_sums.bin", {.verify = true});
  EXPECT_EQ(without.checked_bytes, 0) << "it says of each record that it has no checksum";
  EXPECT_THAT(without.damage, IsEmpty());
  const auto checkpoint = formats::inspect(folder / "checkpoint");
  EXPECT_EQ(checkpoint.format, "checkpoint of save_state");
  EXPECT_EQ(checkpoint.step, 7);
  EXPECT_THAT(checkpoint.damage, IsEmpty());
}

}  // namespace
