accelerate_test(NAME adapters_tests SOURCES ${TEST_DIR}/adapters_test.cpp LIBS accelerate_models LABELS unit)
