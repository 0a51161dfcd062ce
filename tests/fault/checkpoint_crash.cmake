accelerate_test(NAME checkpoint_crash_tests SOURCES ${TEST_DIR}/checkpoint_crash_test.cpp ${PROJECT_SOURCE_DIR}/tests/support/faulty_disk.cpp LABELS fault dist APART COST 30)
