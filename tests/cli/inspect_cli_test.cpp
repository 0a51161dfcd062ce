// `accelerate inspect`: what it prints, and how it ends. tests/unit/inspect_test.cpp has the formats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "formats/checkpoint_manifest.hpp"
#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;

Result inspect(std::vector<std::string> words) {
  words.insert(words.begin(), {cli_test::accelerate_path(), "inspect"});
  return Program(words).wait();
}

/// A checkpoint with one tensor of three floats, and a list of its files.
fs::path checkpoint() {
  const auto folder = fs::path(support::scratch_dir()) / "checkpoint";
  fs::create_directories(folder);
  const std::string header = R"({"w\u001b[31m":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}} )";
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  bytes += header + "elements....";
  std::ofstream(folder / "model.safetensors", std::ios::binary) << bytes;
  accelerate::ChecksumsInTurn sums;
  sums.add(bytes);
  accelerate::formats::CheckpointManifest manifest{.files = {{"model.safetensors", sums.take()}},
                                                   .layout = "safetensors",
                                                   .step = 12,
                                                   .iteration = 4,
                                                   .accelerate = "1",
                                                   .libtorch = "2"};
  std::ofstream(folder / "checkpoint.json") << accelerate::formats::format_manifest(manifest);
  return folder;
}

TEST(InspectCli, PrintsATable) {
  const auto folder = checkpoint();
  const auto result = inspect({folder.string()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(
      result.out,
      AllOf(HasSubstr(folder.string() + ": checkpoint of save_state, safetensors, step 12, iteration 4, 1 rank, "
                                        "by accelerate 1, LibTorch 2\n1 tensor, 1 file, "),
            HasSubstr("  float32  [3]      12 bytes  w"), HasSubstr("No damage was found; --verify reads")));
  EXPECT_EQ(result.out.find('\x1b'), std::string::npos) << "names are plain text";
  EXPECT_THAT(inspect({folder.string(), "--verify"}).out, HasSubstr("Compared with checksums: "));
}

TEST(InspectCli, PrintsJson) {
  const auto folder = checkpoint();
  const auto result = inspect({folder.string(), "--json", "--verify"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const auto json = nlohmann::json::parse(result.out);
  const auto bytes = static_cast<int64_t>(fs::file_size(folder / "model.safetensors"));
  EXPECT_EQ(json["format"], "checkpoint of save_state");
  EXPECT_EQ(json["layout"], "safetensors");
  EXPECT_EQ(json["step"], 12);
  EXPECT_EQ(json["iteration"], 4);
  EXPECT_EQ(json["world_size"], 1);
  EXPECT_EQ(json["tensors"], 1);
  EXPECT_EQ(json["bytes"], bytes);
  EXPECT_EQ(json["verified"]["bytes_compared"], bytes);
  EXPECT_EQ(json["damage"], nlohmann::json::array());
  const auto& part = json["parts"][0];
  EXPECT_EQ(part["path"], "model.safetensors");
  EXPECT_EQ(part["format"], "safetensors");
  EXPECT_EQ(part["tensors"][0]["dtype"], "float32");
  EXPECT_EQ(part["tensors"][0]["shape"], nlohmann::json({3}));
  EXPECT_EQ(part["tensors"][0]["bytes"], 12);
  EXPECT_EQ(nlohmann::json::parse(inspect({folder.string(), "--json"}).out)["verified"], nullptr);
}

TEST(InspectCli, DamageIsNamedAndIsTheExitCode) {
  const auto folder = checkpoint();
  std::fstream(folder / "model.safetensors", std::ios::binary | std::ios::in | std::ios::out).seekp(-3, std::ios::end)
      << 'X';
  EXPECT_EQ(inspect({folder.string()}).exit_code, 0) << "headers are as they were";
  const auto result = inspect({folder.string(), "--verify"});
  EXPECT_EQ(result.exit_code, 65);
  EXPECT_THAT(result.out, AllOf(HasSubstr("float32"), HasSubstr("\nDAMAGED: model.safetensors: ")));
  fs::remove(folder / "model.safetensors");
  const auto json = inspect({folder.string(), "--json"});
  EXPECT_EQ(json.exit_code, 65);
  EXPECT_THAT(nlohmann::json::parse(json.out)["damage"][0].get<std::string>(), HasSubstr("model.safetensors: "));
  EXPECT_EQ(inspect({}).exit_code, 64);
}

}  // namespace
