// What hostile files do to the program: an exit status that says whose fault it is, at once and in little memory.
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

/// The command line that reads such a file; empty where no program without LibTorch does.
std::vector<std::string> command_of(Reader reader, const fs::path& path) {
  switch (reader) {
    case Reader::safetensors:
    case Reader::index:
    case Reader::archive:
    case Reader::gguf:
    case Reader::model_config:
      return {"estimate-memory", path.string()};
    case Reader::launch_config:
      return {"launch", "--config_file", path.string(), "/bin/true"};
    case Reader::hostfile:
      return {"launch", "--hostfile", path.string(), "/bin/true"};
    default:
      return {};
  }
}

int run_program(const std::vector<std::string>& words) {
  const std::string program = ACCELERATE_BIN_DIR "/accelerate";
  std::vector<char*> arguments{const_cast<char*>(program.c_str())};
  for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  ::execv(program.c_str(), arguments.data());
  return 126;
}

TEST(HostileFiles, EndProgramsWithAMessage) {
  constexpr uint64_t kProgram = uint64_t{64} << 20;  // what it and its libraries take before they read anything
  // Bad usage or input, a program that was killed or could not be started, resources: sysexits.h.
  const std::set<int> expected{0, 64, 65, 69, 71, 73};
  std::map<int, int> outcomes;
  int64_t number = 0;
  const fs::path folder = support::scratch_dir();
  for (const auto& hostile_case : hostile::cases()) {
    const auto here = folder / std::to_string(number++);
    const auto command = command_of(hostile_case.reader, here / hostile_case.target);
    if (command.empty()) continue;
    SCOPED_TRACE(hostile_case.name);
    hostile::write(hostile_case, here);
    const auto outcome = hostile::run_limited(kProgram + hostile::allowed_bytes(hostile::bytes_of(hostile_case)),
                                              [&] { return run_program(command); });
    EXPECT_FALSE(outcome.late) << "it waits";
    EXPECT_EQ(outcome.signal, 0);
    EXPECT_TRUE(expected.contains(outcome.exit_code)) << outcome.exit_code << ": " << outcome.output;
    EXPECT_EQ(outcome.output.find("unexpected error"), std::string::npos) << outcome.output;
    if (outcome.exit_code != 0) {
      EXPECT_LT(outcome.output.size(), 2500u) << outcome.output.substr(0, 3000);
      EXPECT_GT(outcome.output.size(), 20u) << "it says why";
    }
    if (hostile_case.name.find("_good_") != std::string::npos) {
      EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
    }
    ++outcomes[outcome.exit_code];
    fs::remove_all(here);
  }
  EXPECT_GT(outcomes[65] + outcomes[64], 300);
  for (const auto& [code, count] : outcomes) std::printf("exit status %d: %d\n", code, count);
}

}  // namespace
