accelerate_test(NAME meta_kernels_tests SOURCES ${TEST_DIR}/meta_kernels_test.cpp LABELS unit)
