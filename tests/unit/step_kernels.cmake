accelerate_test(NAME step_kernels_tests SOURCES ${TEST_DIR}/step_kernels_test.cpp LABELS unit)
