// `accelerate convert`: its options, and how it ends. tests/unit/convert_files_test.cpp has the formats.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "program.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;

fs::path scratch(const std::string& name) { return fs::path(support::scratch_dir()) / name; }

/// Tensors of zeros, which take no room on the disk.
fs::path make_input(int64_t tensors, int64_t elements) {
  nlohmann::json header;
  for (int64_t i = 0; i < tensors; ++i)
    header["t" + std::to_string(100 + i)] = {
        {"dtype", "F32"}, {"shape", {elements}}, {"data_offsets", {4 * elements * i, 4 * elements * (i + 1)}}};
  auto text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length(8, '\0');
  for (size_t i = 0; i < length.size(); ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 255);
  const auto file = scratch("in.safetensors");
  std::ofstream(file, std::ios::binary) << length << text;
  fs::resize_file(file, 8 + text.size() + static_cast<size_t>(4 * elements * tensors));
  return file;
}

Result run(std::vector<std::string> words) {
  words.insert(words.begin(), accelerate_path());
  return Program(words).wait();
}

TEST(ConvertCli, OptionsAct) {
  const auto in = make_input(5, 8);
  const auto out = scratch("out");
  const auto made = run({"convert", in.string(), out.string(), "--to", "torch", "--dtype", "bfloat16",
                         "--max_shard_size", "0.032KB", "--json"});
  ASSERT_EQ(made.exit_code, 0) << made.err;
  const auto json = nlohmann::json::parse(made.out);
  EXPECT_EQ(json["tensors"], 5);
  EXPECT_EQ(json["bytes"], 5 * 8 * 2);
  EXPECT_EQ(json["files"].size(), 4U) << "two tensors each, and the index";
  EXPECT_EQ(json["kept"], 0);
  const auto found = nlohmann::json::parse(run({"inspect", out.string(), "--json", "--verify"}).out);
  EXPECT_EQ(found["format"], "torch archive, several files");
  EXPECT_EQ(found["parts"][0]["tensors"][0]["dtype"], "bfloat16");
  const auto again = run({"convert", in.string(), out.string()});
  EXPECT_EQ(again.exit_code, 64);
  EXPECT_THAT(again.err, HasSubstr("exists. Choose another place"));
  const auto replaced = run({"convert", in.string(), out.string(), "--overwrite"});
  EXPECT_EQ(replaced.exit_code, 0) << replaced.err;
  EXPECT_THAT(replaced.out, AllOf(HasSubstr("5 tensors, 160 bytes, in 1 files"), HasSubstr("The weights are in ")));
  EXPECT_THAT(run({"convert", in.string(), scratch("x").string(), "--tag", "one"}).err, HasSubstr("the tag 'one'"));
}

TEST(ConvertCli, CtrlCKeepsWhatIsWhole) {
  const auto in = make_input(48, 1 << 20);
  const auto out = scratch("out"), work = scratch(".out.unfinished");
  const std::vector<std::string> command = {accelerate_path(), "convert",          in.string(),
                                            out.string(),      "--max_shard_size", "4.2MB"};
  Program program(command);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!fs::exists(work / "model-00002-of-00048.safetensors") && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(milliseconds(1));
  program.signal(SIGINT);
  const auto ended = program.wait();
  EXPECT_EQ(ended.exit_code, 130) << ended.err;
  EXPECT_THAT(ended.err, AllOf(HasSubstr("interrupted"), HasSubstr("from which the same command goes on")));
  EXPECT_FALSE(fs::exists(out));
  auto words = command;
  words.emplace_back("--json");
  const auto result = Program(words).wait();
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GE(nlohmann::json::parse(result.out)["kept"], 2);
  EXPECT_FALSE(fs::exists(work));
}

}  // namespace
