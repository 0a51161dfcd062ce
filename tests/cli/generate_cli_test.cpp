// `accelerate generate` with SmolLM2-135M, whose weights take 538 MB in fp32.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "program.hpp"
#include "python.hpp"
#include "ranks.hpp"
#include "tiny_model.hpp"

namespace {

namespace fs = std::filesystem;
using namespace cli_test;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr milliseconds kDeadline(120000);

std::string model() { return (*support::data_dir() / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf").string(); }

Result generate(std::vector<std::string> arguments, const Program::Options& options = {}) {
  arguments.insert(arguments.begin(), {accelerate(), "generate"});
  return Program(arguments, options).wait(kDeadline);
}

nlohmann::json answer(std::vector<std::string> arguments) {
  arguments.push_back("--json");
  const auto result = generate(std::move(arguments));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
}

const std::vector<std::string> kQuestion = {"--prompt", "What is the capital of France?", "--max_new_tokens", "8"};

std::vector<std::string> with(std::vector<std::string> first, const std::vector<std::string>& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

TEST(Generate, AnswersWithin150MegabytesAsItDoesInMemory) {
  SKIP_WITHOUT_DATA();
  const auto whole = answer(with({model(), "--dtype", "float32"}, kQuestion));
  EXPECT_THAT(whole.at("text").get<std::string>(), HasSubstr("Paris"));
  EXPECT_EQ(whole.at("streamed_weight_bytes"), 0);
  EXPECT_GT(whole.at("peak_resident_weight_bytes").get<int64_t>(), 530'000'000);
  // Where nobody asks for numbers, the weights stay as the file has them.
  const auto in_codes = answer(with({model(), "--exact_products"}, kQuestion));
  EXPECT_EQ(in_codes.at("text"), whole.at("text"));
  // Activations in 8 bits, the default as llama.cpp's, are not enough for this model to know of Paris.
  EXPECT_NE(answer(with({model()}, kQuestion)).at("text"), whole.at("text"));
  EXPECT_LT(in_codes.at("peak_resident_weight_bytes").get<int64_t>(), 100'000'000);
  // The embedding, which is the head as well, takes 113 MB of it.
  const auto limited = answer(with({model(), "--max_memory", "cpu=150MB"}, kQuestion));
  EXPECT_EQ(limited.at("text"), whole.at("text"));
  EXPECT_EQ(answer(with({model(), "--max_memory", "cpu=150000000"}, kQuestion)).at("streamed_weight_bytes"),
            limited.at("streamed_weight_bytes"))
      << "a number of bytes";
  EXPECT_EQ(answer(with({model(), "--device_map", "disk"}, kQuestion)).at("text"), whole.at("text"));
  EXPECT_EQ(
      answer(with({model(), "--device_map", R"({"model.embed_tokens": "cpu", "": "disk"})"}, kQuestion)).at("text"),
      whole.at("text"));
  EXPECT_LE(limited.at("peak_resident_weight_bytes").get<int64_t>(), 150'000'000);
  EXPECT_GT(limited.at("weight_bytes_fetched").get<int64_t>(), 538'000'000) << "a part of it came again and again";
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/// A line of /proc/PID/status, in bytes.
int64_t memory_of(pid_t pid, const std::string& key) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  ADD_FAILURE() << "no " << key;
  return 0;
}

// Of SmolLM2 in 4 bits: 96 MB of codes, 57 MB of LibTorch's operators, 42 MB of keys and values; some 30 MB of
// LibTorch's code. Before things were given back it had 80 MB of files (code that only registers operators, pages of
// the model beside what is read), 270 MB of the rest, and a peak of 570 MB (activations, by the C library's allocator).
TEST(Generate, KeepsLittleBesideTheWeightsAfterALongPrompt) {
  SKIP_WITHOUT_DATA();
  std::string text;
  for (int day = 0; day < 35; ++day)
    text += "Day " + std::to_string(day) + " was long, and nobody knew what came next. ";
  Program program({accelerate(), "generate", model(), "--raw", "--prompt", text, "--max_new_tokens", "1000"});
  ASSERT_TRUE(program.wait_for("ay", kDeadline)) << "the first tokens";
  EXPECT_LT(memory_of(program.pid(), "RssFile"), 50'000'000);
  EXPECT_LT(memory_of(program.pid(), "RssAnon"), 225'000'000);
  EXPECT_LT(memory_of(program.pid(), "VmHWM"), 400'000'000);
  ::kill(program.pid(), SIGKILL);
  program.wait(kDeadline);
}
#endif

TEST(Generate, StreamsWhatItSays) {
  SKIP_WITHOUT_DATA();
  Program program(with({accelerate(), "generate", model(), "--stats"},
                       {"--prompt", "Tell me a long story about a river.", "--max_new_tokens", "40"}));
  EXPECT_TRUE(program.wait_for("river", kDeadline)) << "before the end";
  EXPECT_FALSE(gone(program.pid(), milliseconds(1)));
  const auto result = program.wait(kDeadline);
  EXPECT_EQ(result.exit_code, 0);
  // A reader of five seconds writes lines of how far it is, also to a file; redrawn in place it is on terminals only.
  EXPECT_THAT(result.err, AllOf(HasSubstr("tokens written"), Not(HasSubstr("\r"))));
}

TEST(Generate, ALongPromptShowsHowFarItIsRead) {
  SKIP_WITHOUT_DATA();
  std::string prompt;
  for (int i = 0; i < 135; ++i) prompt += "yes no ";
  const auto seen =
      Program({accelerate(), "generate", model(), "--raw", "--prompt", prompt, "--stats", "--max_new_tokens", "2"},
              {.terminal = true, .rows = 20, .columns = 100})
          .wait(kDeadline);
  EXPECT_EQ(seen.exit_code, 0) << seen.out;
  const size_t bar = seen.out.find("reading 271 tokens"), done = seen.out.find("100%|"),
               answered = seen.out.find("tokens written");
  EXPECT_NE(bar, std::string::npos) << seen.out;
  EXPECT_LT(bar, done);
  EXPECT_LT(done, answered) << seen.out;
  EXPECT_THAT(seen.out, HasSubstr("30/30"));
}

TEST(Generate, InterruptingEndsTheAnswer) {
  SKIP_WITHOUT_DATA();
  Program program(with({accelerate(), "generate", model()}, {"--raw", "--prompt", "0 1 0 1 0 1 0 1 0 1 0 1 0 1",
                                                             "--max_new_tokens", "4000"}));  // no end by itself
  ASSERT_TRUE(program.wait_for(" ", kDeadline));
  program.signal(SIGINT);
  const auto result = program.wait(kDeadline);
  EXPECT_EQ(result.exit_code, 130);
  EXPECT_TRUE(result.out.ends_with("\n")) << "the line is ended";
}

TEST(Generate, TextsFromStandardInputStopTextsAndRawPrompts) {
  SKIP_WITHOUT_DATA();
  const auto piped =
      generate({model(), "--exact_products", "--max_new_tokens", "16"}, {.input = "What is the capital of France?"});
  EXPECT_EQ(piped.exit_code, 0) << piped.err;
  EXPECT_THAT(piped.out, HasSubstr("Paris"));
  const auto stopped = generate(with({model(), "--exact_products", "--stop", "Paris"}, kQuestion));
  EXPECT_EQ(stopped.exit_code, 0) << stopped.err;
  EXPECT_EQ(stopped.out.find("Paris"), std::string::npos) << stopped.out;
  const auto raw =
      answer({model(), "--exact_products", "--raw", "--prompt", "The capital of France is", "--max_new_tokens", "3"});
  EXPECT_THAT(raw.at("text").get<std::string>(), HasSubstr("Paris"));
  EXPECT_EQ(raw.at("prompt_tokens"), 5) << "no template around it";
}

TEST(Generate, AChatThroughAPipeAnswersEachLine) {
  SKIP_WITHOUT_DATA();
  const auto chat = generate({model(), "--chat", "--json", "--max_new_tokens", "8"},
                             {.input = "My name is Ada. Say hello.\n\nWhat is my name?\n"});
  ASSERT_EQ(chat.exit_code, 0) << chat.err;
  std::istringstream all(chat.out);
  std::vector<int64_t> prompts;
  for (nlohmann::json turn; all >> std::ws && !all.eof();) {
    all >> turn;
    prompts.push_back(turn.at("prompt_tokens").get<int64_t>());
  }
  ASSERT_EQ(prompts.size(), 2u);
  EXPECT_GT(prompts[1], prompts[0] + 8) << "the second prompt has the first and its answer before it";
  EXPECT_THAT(generate(with({model(), "--chat"}, kQuestion)).err, HasSubstr("leave --prompt or --chat out"));
}

TEST(Generate, TheSeedDecidesWhatIsDrawn) {
  SKIP_WITHOUT_DATA();
  const auto drawn = [](const char* seed) {
    return answer({model(), "--prompt", "Invent a name for a ship.", "--max_new_tokens", "12", "--temperature", "1.5",
                   "--seed", seed})
        .at("text");
  };
  const auto first = drawn("1");
  EXPECT_EQ(first, drawn("1"));
  EXPECT_NE(first, drawn("2"));
}

TEST(Generate, NumbersAreReadWhole) {
  const std::pair<std::vector<std::string>, const char*> mistakes[] = {
      {{"--num_threads", "100000"}, "--num_threads is 100000, expected a number from 1 to 1024"},
      {{"--num_threads", "0"}, "--num_threads is 0, expected"},
      {{"--seed", "1.5"}, "--seed is '1.5', expected a whole number"},
      {{"--max_new_tokens", "1e3"}, "--max_new_tokens is '1e3', expected a whole number"},
      {{"--temperature", "abc"}, "--temperature is 'abc', expected a number"},
      {{"--temperature", "-1"}, "--temperature is -1, expected more than 0, or 0 for the likeliest token"}};
  const std::string folder = (fs::path(support::scratch_dir()) / "numbers").string();
  write_tiny_model(folder);
  for (const auto& [words, message] : mistakes) {
    const auto result = generate(with({folder, "--raw", "--prompt", "a"}, words));
    EXPECT_EQ(result.exit_code, 64) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
}

TEST(Generate, OptionsWithoutEffectAreRefused) {
  const std::string folder = (fs::path(support::scratch_dir()) / "without_effect").string();
  write_tiny_model(folder);
  const std::pair<std::vector<std::string>, const char*> mistakes[] = {
      {{"--prompt", "a", "--temperature", "0", "--top_k", "3"}, "--top_k was given with --temperature 0"},
      {{"--prompt", "a", "--top_p", "0.5", "--temperature", "0"}, "--top_p was given with --temperature 0"},
      {{"--prompt", "a", "--seed", "1"}, "--seed was given and nothing is drawn"},
      {{"--prompt", "a", "--length_penalty", "2"}, "--length_penalty was given without beams"},
      {{"--prompt", "a", "--system", "b"}, "--system was given with --raw"},
      {{"--chat"}, "--chat was given with --raw"}};
  for (const auto& [words, message] : mistakes) {
    const auto result = generate(with({folder, "--raw"}, words));
    EXPECT_EQ(result.exit_code, 64) << message;
    EXPECT_THAT(result.err, HasSubstr(message));
  }
  const std::vector<std::string> good[] = {{"--temperature", "0.5", "--top_k", "3", "--top_p", "0.5", "--seed", "1"},
                                           {"--top_k", "3", "--seed", "1"},
                                           {"--num_beams", "2", "--length_penalty", "2"}};
  for (const auto& words : good)
    EXPECT_EQ(generate(with({folder, "--raw", "--prompt", "abc", "--max_new_tokens", "2"}, words)).exit_code, 0)
        << testing::PrintToString(words);
}

TEST(Generate, AHeadThatIsACopyOfTheEmbeddingsIsNone) {
  const auto said = [](const char* name, const TinyModel& model) {
    const std::string folder = (fs::path(support::scratch_dir()) / name).string();
    write_tiny_model(folder, model);
    return answer({folder, "--raw", "--prompt", "abc", "--max_new_tokens", "5"});
  };
  EXPECT_EQ(said("copy", {.has_copy = true}).at("text"), said("tied", {}).at("text"));
}

TEST(Generate, LogitsThatAreNoNumbersAreNamed) {
  const std::string folder = (fs::path(support::scratch_dir()) / "broken").string();
  write_tiny_model(folder, {.is_broken = true});
  const auto result = generate({folder, "--raw", "--prompt", "abc", "--max_new_tokens", "5"});
  EXPECT_EQ(result.exit_code, 65);
  EXPECT_THAT(result.err, HasSubstr("no finite numbers"));
}

TEST(Generate, MistakesAreNamed) {
  EXPECT_THAT(generate({"no_such_model", "--prompt", "x"}).err,
              AllOf(HasSubstr("no_such_model"), HasSubstr("does not exist")));
  SKIP_WITHOUT_DATA();
  const auto small = generate(with({model(), "--max_memory", "cpu=20MB"}, kQuestion));
  EXPECT_NE(small.exit_code, 0);
  EXPECT_THAT(small.err, HasSubstr("At least 113246208 bytes"));
  EXPECT_THAT(generate(with({model(), "--max_memory", "150MB"}, kQuestion)).err, HasSubstr("expected PLACE=SIZE"));
  EXPECT_THAT(generate(with({model(), "--device_map", "{\"no.such.module\": \"cpu\"}"}, kQuestion)).err,
              HasSubstr("no.such.module"));
  EXPECT_THAT(generate(with({model(), "--top_p", "2"}, kQuestion)).err, HasSubstr("top_p"));
}

}  // namespace
