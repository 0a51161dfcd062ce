// Each case finds what it would find as the only one of its process: ctest runs the cases of a source in one.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "accelerate/state.hpp"
#include "utils/log.hpp"

extern char** environ;

namespace {

std::map<std::string, std::string> environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text(*entry);
    const auto end = text.find('=');
    variables.emplace(text.substr(0, end), text.substr(end + 1));
  }
  return variables;
}

class FreshStart : public testing::EmptyTestEventListener {
  // Not earlier: a rank gets its environment in front of main(), after this object is made (rank_server.hpp).
  void OnTestProgramStart(const testing::UnitTest&) override { first_ = environment(); }

  void OnTestStart(const testing::TestInfo&) override {
    if (const auto now = environment(); now != first_) {
      for (const auto& [name, value] : now)
        if (!first_.contains(name)) ::unsetenv(name.c_str());
      for (const auto& [name, value] : first_) ::setenv(name.c_str(), value.c_str(), 1);
    }
    if (accelerate::AcceleratorState::initialized()) accelerate::AcceleratorState::reset();
    if (accelerate::PartialState::initialized()) accelerate::PartialState::reset();
    accelerate::GradientState::reset();
    accelerate::logs::reset();
    // LibTorch seeds its default generator at random; a test that fails must fail again.
    at::manual_seed(20261121);
  }

  std::map<std::string, std::string> first_;
};

const bool installed = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new FreshStart);  // gtest owns it
  return true;
}();

}  // namespace
