accelerate_test(NAME homes_tests SOURCES ${TEST_DIR}/homes_test.cpp LABELS dist)
