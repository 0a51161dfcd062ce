accelerate_test(NAME parallelism_tests SOURCES ${TEST_DIR}/parallelism_test.cpp LABELS dist)
