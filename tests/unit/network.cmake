accelerate_test(NAME network_tests SOURCES ${TEST_DIR}/network_test.cpp LIBS accelerate_launch LABELS unit tsan quick NO_TORCH)
