accelerate_test(NAME sagemaker_tests SOURCES ${TEST_DIR}/sagemaker_test.cpp LIBS accelerate_sagemaker_parts LABELS unit cli NO_TORCH)
