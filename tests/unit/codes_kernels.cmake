accelerate_test(NAME codes_kernels_tests SOURCES ${TEST_DIR}/codes_kernels_test.cpp LABELS unit quick)
