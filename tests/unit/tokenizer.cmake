accelerate_test(NAME tokenizer_tests SOURCES ${TEST_DIR}/tokenizer_test.cpp LIBS accelerate_models LABELS unit COST 40 TIMEOUT 900)
