accelerate_test(NAME step_in_backward_tests SOURCES ${TEST_DIR}/step_in_backward_test.cpp ${TEST_DIR}/step_at_once_test.cpp LABELS dist COST 20 TIMEOUT 600)
