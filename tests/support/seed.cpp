// LibTorch seeds its default generator at random; a test that fails must fail again.
#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace {

class SeedEachTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { at::manual_seed(20261121); }
};

const bool installed = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);  // gtest owns it
  return true;
}();

}  // namespace
