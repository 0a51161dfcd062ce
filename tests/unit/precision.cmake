accelerate_test(NAME precision_tests SOURCES ${TEST_DIR}/precision_test.cpp LABELS unit)
accelerate_test(NAME fp8_tests SOURCES ${TEST_DIR}/fp8_test.cpp LIBS accelerate_models LABELS unit)
