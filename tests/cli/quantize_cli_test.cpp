// `accelerate quantize` with SmolLM2-135M, and what the other commands make of its results.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "program.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "tiny_model.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::HasSubstr;

constexpr milliseconds kDeadline(120000);

std::string smollm2() { return (*support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").string(); }
std::string scratch(const std::string& name) { return (fs::path(support::scratch_dir()) / name).string(); }

Result run(std::vector<std::string> words, const Program::Options& options = {}) {
  words.insert(words.begin(), accelerate_path());
  return Program(words, options).wait(kDeadline);
}
nlohmann::json json_of(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
}
size_t files_in(const std::string& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

TEST(Quantize, AReportHasErrorsSizesAndPerplexity) {
  SKIP_WITHOUT_DATA();
  const std::string text = scratch("text.txt"), out = scratch("q8_0.gguf");
  std::ofstream(text) << "In the beginning God created the heaven and the earth. And the earth was without form, and "
                         "void; and darkness was upon the face of the deep.";
  const auto report = json_of(run({"quantize", smollm2(), out, "--to", "q8_0", "--report", "--text", text,
                                   "--max_tokens", "30", "--exact_products", "--json"}));
  EXPECT_EQ(report["perplexity"]["tokens"], 30);
  const double before = report["perplexity"]["before"], after = report["perplexity"]["after"];
  EXPECT_NEAR(std::log(after / before), 0, 0.02) << "8 bits for what had 4: rounding of a hundredth";
  EXPECT_GT(before, 1);
  EXPECT_LT(before, 30);
  EXPECT_GT(report["bytes_after"], report["bytes_before"]);
  double most = 0;
  for (const auto& tensor : report["tensors"])
    if (!tensor["error"].is_null()) most = std::max(most, tensor["error"].get<double>());
  EXPECT_GT(most, 1e-3);
  EXPECT_LT(most, 0.02);
  const auto estimate = json_of(run({"estimate-memory", out, "--json"}));
  EXPECT_EQ(estimate["stored"]["encoding"], "Q8_0");
  EXPECT_EQ(estimate["stored"]["total"], report["bytes_after"]);
  EXPECT_THAT(run({"estimate-memory", out}).out, HasSubstr("Q8_0, stored"));
  const auto said = json_of(run({"generate", out, "--prompt", "What is the capital of France?", "--max_new_tokens", "8",
                                 "--exact_products", "--json"}));
  EXPECT_THAT(said["text"].get<std::string>(), HasSubstr("Paris"));
  EXPECT_LT(said["peak_resident_weight_bytes"], 160'000'000) << "codes, not numbers";
}

TEST(Quantize, TheFolderOfAFileHasAllThatGenerateNeeds) {
  SKIP_WITHOUT_DATA();
  const std::string folder = scratch("smollm2_nf4");
  EXPECT_EQ(json_of(run({"quantize", smollm2(), folder, "--to", "nf4", "--json"}))["notes"], nlohmann::json::array());
  const auto said = json_of(
      run({"generate", folder, "--prompt", "What is the capital of France?", "--max_new_tokens", "8", "--json"}));
  EXPECT_THAT(said["text"].get<std::string>(), HasSubstr("Paris"));
  EXPECT_EQ(said["new_tokens"], 8) << "the end of the answer is one of them";
  EXPECT_THAT(run({"quantize", folder, scratch("x.gguf"), "--to", "q8_0"}).err, HasSubstr("in few bits already"));
  EXPECT_THAT(run({"generate", folder, "--prompt", "x", "--load_in_8bit"}).err, HasSubstr("in few bits already"));

  const std::string shards = scratch("shards");
  json_of(run({"quantize", smollm2(), shards, "--to", "nf4", "--max_shard_size", "40MB", "--json"}));
  EXPECT_TRUE(fs::exists(fs::path(shards) / "model-00003-of-00003.safetensors"));
  const auto again = json_of(
      run({"generate", shards, "--prompt", "What is the capital of France?", "--max_new_tokens", "8", "--json"}));
  EXPECT_EQ(again["text"], said["text"]);
}

TEST(Quantize, GenerateComputesInTheBitsThatWereAskedFor) {
  SKIP_WITHOUT_DATA();
  EXPECT_THAT(run({"generate", smollm2(), "--prompt", "x", "--load_in_8bit"}).err,
              testing::AllOf(HasSubstr("in few bits already"), HasSubstr("--load_in_8bit")));
  EXPECT_THAT(run({"generate", smollm2(), "--prompt", "x", "--bnb_4bit_quant_type", "fp4"}).err,
              HasSubstr("without --load_in_4bit"));
  write_tiny_model(scratch("numbers"));
  EXPECT_THAT(run({"generate", scratch("numbers"), "--raw", "--prompt", "a", "--exact_products"}).err,
              HasSubstr("weights that are numbers"));
}

TEST(Quantize, MistakesAreNamed) {
  const auto nothing = run({"quantize", scratch("no_model"), scratch("x"), "--to", "nf4"});
  EXPECT_NE(nothing.exit_code, 0);
  EXPECT_THAT(nothing.err, HasSubstr("does not exist"));
  const auto raw = run({"quantize", scratch("no\033[2Jmodel\033]0;title\a"), scratch("x"), "--to", "nf4"});
  EXPECT_THAT(raw.err, testing::AllOf(HasSubstr("nomodel' does not exist"), testing::Not(HasSubstr("\033"))));
  EXPECT_THAT(run({"quantize", "a", "b"}).err, HasSubstr("--to must be given"));
  EXPECT_THAT(run({"quantize", "a", "b", "--to", "q3_k"}).err, HasSubstr("q3_k"));
  EXPECT_THAT(run({"quantize", "a", "b", "--to", "nf4", "--text", "c"}).err, HasSubstr("without --report"));
}

TEST(Quantize, InterruptingLeavesNothing) {
  SKIP_WITHOUT_DATA();
  const std::string folder = scratch("interrupted");
  fs::create_directories(folder);
  Program program({accelerate_path(), "quantize", smollm2(), folder + "/nf4", "--to", "nf4", "--num_threads", "1"},
                  {.terminal = true, .rows = 20, .columns = 100});
  ASSERT_TRUE(program.wait_for("quantizing", kDeadline));
  EXPECT_EQ(files_in(folder), 1u) << "a temporary one";
  program.signal(SIGINT);
  const auto result = program.wait(kDeadline);
  EXPECT_EQ(result.exit_code, 130) << result.out;
  EXPECT_THAT(result.out, HasSubstr("nothing was written"));
  EXPECT_EQ(files_in(folder), 0u);
}

TEST(Quantize, AClosedTerminalAndAnEndLeaveNothingEither) {
  SKIP_WITHOUT_DATA();
  for (const int signal : {SIGHUP, SIGTERM}) {
    const std::string folder = scratch("ended" + std::to_string(signal));
    fs::create_directories(folder);
    Program program({accelerate_path(), "quantize", smollm2(), folder + "/nf4", "--to", "nf4", "--num_threads", "1"},
                    {.terminal = true, .rows = 20, .columns = 100});
    ASSERT_TRUE(program.wait_for("quantizing", kDeadline));
    program.signal(signal);
    EXPECT_EQ(program.wait(kDeadline).exit_code, 128 + signal);
    EXPECT_EQ(files_in(folder), 0u);
  }
}

TEST(Quantize, InterruptingTheSecondPerplexityKeepsTheResult) {
  const std::string in = scratch("in"), out = scratch("out"), text = scratch("long.txt");
  write_tiny_model(in);
  std::ofstream(text) << std::string(400'000, 'a');
  Program program({accelerate_path(), "quantize", in, out, "--to", "nf4", "--report", "--text", text, "--max_tokens",
                   "400000", "--num_threads", "1"},
                  {.terminal = true, .rows = 20, .columns = 100});
  ASSERT_TRUE(program.wait_for("after", kDeadline));
  program.signal(SIGINT);
  const auto result = program.wait(kDeadline);
  EXPECT_EQ(result.exit_code, 130) << result.out;
  EXPECT_THAT(result.out, HasSubstr("out' is whole; its perplexity was not measured"));
  EXPECT_TRUE(fs::exists(out + "/config.json"));
}

TEST(Quantize, ResultsSayHowManyTensorsAreInWhat) {
  const std::string in = scratch("in"), out = scratch("out.gguf");
  write_tiny_model(in, {.has_copy = true});
  const auto said = run({"quantize", in, out, "--to", "q4_k"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_THAT(said.out, HasSubstr("11 tensors, 3 in F32, 8 in Q5_0: "));
  EXPECT_THAT(said.out, HasSubstr("8 matrices are in q5_0"));
  const auto json = json_of(run({"quantize", in, out, "--to", "q4_k", "--overwrite", "--json"}));
  EXPECT_EQ(json["encodings"], nlohmann::json({{"F32", 3}, {"Q5_0", 8}}));
  EXPECT_EQ(json["notes"].size(), 2u) << json["notes"];
  // A report that nobody gets is an error.
  const auto lost =
      Program({"/bin/sh", "-c",
               accelerate_path() + " quantize " + in + " " + out + " --to q8_0 --overwrite --json > /dev/full"})
          .wait(kDeadline);
  EXPECT_EQ(lost.exit_code, 73);
  EXPECT_THAT(lost.err, HasSubstr("standard output can't be written"));
}

TEST(Quantize, MistakesAreNamedBeforeAnythingIsMeasured) {
  const std::string in = scratch("in"), out = scratch("out"), text = scratch("text.txt");
  write_tiny_model(in);
  fs::create_directories(scratch("mine"));
  const auto refused = [&](const std::string& to, const std::vector<std::string>& more) {
    std::vector<std::string> words{"quantize", in, to, "--to", "nf4"};
    words.insert(words.end(), more.begin(), more.end());
    const auto result = run(words);
    EXPECT_EQ(result.exit_code, 64) << result.err;
    return result.err;
  };
  // The text is not there, which would be the next mistake.
  EXPECT_THAT(refused(out, {"--report", "--text", text, "--block_size", "48"}), HasSubstr("power of two"));
  EXPECT_THAT(refused(scratch("mine"), {"--report", "--text", text, "--overwrite"}), HasSubstr("nothing else"));
  EXPECT_THAT(refused(out + ".gguf", {"--report", "--text", text}), HasSubstr("does not end in .gguf"));
  EXPECT_THAT(refused("", {}), HasSubstr("found ''"));
  EXPECT_THAT(refused(out, {"--threshold", "6"}), HasSubstr("threshold was given with the encoding nf4"));
  EXPECT_THAT(refused(out, {"--report", "--exact_products"}), HasSubstr("--exact_products was given without --text"));
  EXPECT_THAT(refused(out, {"--report", "--max_tokens", "5"}), HasSubstr("--max_tokens was given without --text"));
  for (const char* number : {"abc", "1e3", "64.0", ""})
    EXPECT_THAT(refused(out, {"--block_size", number}),
                HasSubstr("--block_size is '" + std::string(number) + "', expected a whole number"));
  for (const char* number : {"0", "-3", "100000"})
    EXPECT_THAT(refused(out, {"--num_threads", number}), HasSubstr("expected a number from 1 to 1024"));
  std::ofstream(text) << "abc";
  for (const char* number : {"0", "-1"})
    EXPECT_THAT(refused(out, {"--report", "--text", text, "--max_tokens", number}), HasSubstr("expected 2 or more"));
  EXPECT_FALSE(fs::exists(out));
}

}  // namespace
