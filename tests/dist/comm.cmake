accelerate_test(NAME comm_tests SOURCES ${TEST_DIR}/comm_test.cpp LABELS dist tsan quick WAITS COST 50)
