accelerate_test(NAME snapshot_tests SOURCES ${TEST_DIR}/snapshot_test.cpp LABELS unit tsan)
