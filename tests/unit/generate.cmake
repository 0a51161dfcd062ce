accelerate_test(NAME generate_tests SOURCES ${TEST_DIR}/generate_test.cpp LIBS accelerate_models LABELS unit COST 60 TIMEOUT 600)
