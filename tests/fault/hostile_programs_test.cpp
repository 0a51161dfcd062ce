// The program answers hostile files by an exit status that says whose fault it is, at once and in little memory.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "hostile_files.hpp"
#include "limited_child.hpp"
#include "ranks.hpp"

namespace {

namespace fs = std::filesystem;
using hostile::Reader;

using Words = std::vector<std::string>;

/// The command lines that read such a file.
std::vector<Words> commands_of(Reader reader, const fs::path& path) {
  switch (reader) {
    case Reader::safetensors:
    case Reader::index:
    case Reader::archive:
    case Reader::gguf:
    case Reader::model_config:
      return {{"estimate-memory", path.string()}};
    case Reader::dcp:
      return {{"merge-weights", path.string(), (path / "merged").string()}};
    case Reader::model:
      return {{"generate", path.string(), "--prompt", "ab", "--raw", "--max_new_tokens", "2"}};
    case Reader::launch_config:
      return {{"launch", "--config_file", path.string(), "/bin/true"},
              {"env", "--config_file", path.string()},
              {"tpu-config", "--debug", "--tpu_name", "a", "--tpu_zone", "b", "--config_file", path.string()},
              {"to-fsdp2", "--config_file", path.string(), "--output_file", path.string() + ".new"},
              {"config", "update", "--config_file", path.string()}};  // writes it: the last one
    case Reader::hostfile:
      return {{"launch", "--hostfile", path.string(), "/bin/true"},
              {"tpu-config", "--debug", "--tpu_name", "a", "--tpu_zone", "b", "--command_file", path.string()}};
    default:
      return {};
  }
}

bool needs_libtorch(Reader reader) { return reader == Reader::dcp || reader == Reader::model; }

hostile::Outcome run_program(uint64_t bytes, const std::vector<std::string>& words) {
  const std::string program = ACCELERATE_BIN_DIR "/accelerate";
  std::vector<char*> arguments{const_cast<char*>(program.c_str())};
  for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const auto execute = [&] { return ::execv(program.c_str(), arguments.data()) == 0 ? 0 : 126; };
  return hostile::run_limited(bytes, execute, /*execs=*/true);
}

TEST(HostileFiles, EndProgramsWithAMessage) {
  ::setenv("OMP_NUM_THREADS", "1", 1);  // each thread has 72 MB of addresses
  // Limits for a program and its libraries before they read anything.
  constexpr uint64_t kProgram = uint64_t{64} << 20, kProgramWithLibTorch = uint64_t{3} << 30;
  // Loading LibTorch takes longer than reading, and the library has had the same files in the other test.
  constexpr int kEachWithLibTorch = 24;
  // Bad usage or input, a program that was killed or could not be started, resources: sysexits.h.
  const std::set<int> expected{0, 64, 65, 69, 71, 73};
  std::map<int, int> outcomes;
  int64_t number = 0, with_libtorch = 0;
  const fs::path folder = support::scratch_dir();
  for (const auto& hostile_case : hostile::cases()) {
    const auto here = folder / std::to_string(number++);
    const bool good = hostile_case.name.find("_good_") != std::string::npos;
    const bool libtorch = needs_libtorch(hostile_case.reader);
    if (libtorch && !good && ++with_libtorch % kEachWithLibTorch != 0) continue;
    const auto commands = commands_of(hostile_case.reader, here / hostile_case.target);
    if (commands.empty()) continue;
    hostile::write(hostile_case, here);
    const auto bytes =
        (libtorch ? kProgramWithLibTorch : kProgram) + hostile::allowed_bytes(hostile::bytes_of(hostile_case));
    for (const auto& command : commands) {
      SCOPED_TRACE(hostile_case.name + ": " + command[0]);
      const auto outcome = run_program(bytes, command);
      EXPECT_FALSE(outcome.late) << "it waits";
      EXPECT_EQ(outcome.signal, 0);
      EXPECT_TRUE(expected.contains(outcome.exit_code)) << outcome.exit_code << ": " << outcome.output;
      EXPECT_EQ(outcome.output.find("unexpected error"), std::string::npos) << outcome.output;
      if (outcome.exit_code != 0) {
        EXPECT_LT(outcome.output.size(), 2500u) << outcome.output.substr(0, 3000);
        EXPECT_GT(outcome.output.size(), 20u) << "it says why";
      }
      if (good) {
        EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
      }
      ++outcomes[outcome.exit_code];
    }
    fs::remove_all(here);
  }
  EXPECT_GT(outcomes[65] + outcomes[64], 500);
  for (const auto& [code, count] : outcomes) std::printf("exit status %d: %d\n", code, count);
}

}  // namespace
