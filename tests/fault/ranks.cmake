accelerate_test(NAME ranks_fault_tests SOURCES ${TEST_DIR}/ranks_test.cpp LABELS fault dist WAITS COST 20)
