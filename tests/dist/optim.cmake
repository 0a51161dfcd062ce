accelerate_test(NAME optim_ranks_tests SOURCES ${TEST_DIR}/optim_test.cpp LABELS dist)
