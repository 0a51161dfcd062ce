accelerate_test(NAME gguf_tests SOURCES ${TEST_DIR}/gguf_test.cpp LIBS accelerate_models LABELS unit)
