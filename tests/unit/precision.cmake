accelerate_test(NAME precision_tests SOURCES ${TEST_DIR}/precision_test.cpp LABELS unit)
