accelerate_test(NAME quantize_tests SOURCES ${TEST_DIR}/quantize_test.cpp LIBS accelerate_models LABELS unit APART COST 60)
accelerate_test(NAME quantized_models_tests SOURCES ${TEST_DIR}/quantized_models_test.cpp LABELS unit COST 5)
