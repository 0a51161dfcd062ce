accelerate_test(NAME quantize_tests SOURCES ${TEST_DIR}/quantize_test.cpp LIBS accelerate_models LABELS unit COST 60)
