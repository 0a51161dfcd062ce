accelerate_test(NAME codes_on_gpu_tests SOURCES ${TEST_DIR}/codes_on_gpu_test.cpp LIBS accelerate_cuda_emulation LABELS unit APART)
