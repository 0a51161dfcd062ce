accelerate_test(NAME inspect_tests SOURCES ${TEST_DIR}/inspect_test.cpp LABELS unit)
