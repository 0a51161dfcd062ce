accelerate_test(NAME gpt2_tests SOURCES ${TEST_DIR}/gpt2_test.cpp LIBS accelerate_models LABELS unit)
