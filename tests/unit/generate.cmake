accelerate_test(NAME generate_tests SOURCES ${TEST_DIR}/generate_test.cpp LIBS accelerate_models LABELS unit TIMEOUT 600)
