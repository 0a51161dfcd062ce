accelerate_test(NAME failed_attempt_tests SOURCES ${TEST_DIR}/failed_attempt_test.cpp LABELS dist)
