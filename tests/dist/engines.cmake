accelerate_test(NAME engines_tests SOURCES ${TEST_DIR}/engines_test.cpp LABELS dist)
