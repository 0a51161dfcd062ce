accelerate_test(NAME bert_tests SOURCES ${TEST_DIR}/bert_test.cpp LIBS accelerate_models LABELS unit)
