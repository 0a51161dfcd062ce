accelerate_test(NAME utils_tests SOURCES ${TEST_DIR}/utils_test.cpp LABELS unit)
