#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "rank_server.hpp"

namespace {

/// ctest's SKIP_RETURN_CODE in tests/CMakeLists.txt.
constexpr int kSkipped = 77;

/// Whether every suite of this binary is among those that CMake has found in its sources and made ctest cases of.
bool ctest_has_all(const std::string& suites) {
  bool all = true;
  const auto& tests = *testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    std::string_view name = tests.GetTestSuite(i)->name();
    name.remove_prefix(name.rfind('/') + 1);  // INSTANTIATE_TEST_SUITE_P's prefix
    if (("," + suites + ",").find("," + std::string(name) + ",") != std::string::npos) continue;
    std::fprintf(stderr,
                 "suite %s is in no ctest case: TEST, TEST_F, TEST_P or RANKS_TEST must begin its line; then configure "
                 "again\n",
                 std::string(name).c_str());
    all = false;
  }
  return all;
}

int run(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* suites = std::getenv("ACCELERATE_TEST_SUITES");
  if (!suites) return RUN_ALL_TESTS();
  if (!ctest_has_all(suites)) return 1;
  const int failed = RUN_ALL_TESTS();
  // Readers of ctest's summary shall see that not all of a source has run.
  return failed == 0 && testing::UnitTest::GetInstance()->skipped_test_count() > 0 ? kSkipped : failed;
}

}  // namespace

int main(int argc, char** argv) { return support::main_or_rank_server(argc, argv, run); }
