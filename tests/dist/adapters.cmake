accelerate_test(NAME adapters_ranks_tests SOURCES ${TEST_DIR}/adapters_test.cpp LABELS dist)
