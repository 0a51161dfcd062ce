// Our readers or the Python packages may accept a damaged file that the other refuses. Each such case is explained in
// differential.py; the same program compares more files when it is run by hand.
#include <gtest/gtest.h>

#include "python.hpp"

namespace {

TEST(Differential, WhoeverAcceptsWhatTheOtherRefusesIsExplained) {
  SKIP_WITHOUT_PYTHON();
  const auto result =
      support::run_python("tests/fault/differential.py", {ACCELERATE_BIN_DIR "/verdicts", "--inputs", "200"});
  EXPECT_EQ(result.exit_code, 0) << result.output;
}

}  // namespace
