accelerate_test(NAME codes_tests SOURCES ${TEST_DIR}/codes_test.cpp LIBS accelerate_models LABELS unit)
