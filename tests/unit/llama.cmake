accelerate_test(NAME llama_tests SOURCES ${TEST_DIR}/llama_test.cpp LIBS accelerate_models LABELS unit)
