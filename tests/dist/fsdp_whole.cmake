accelerate_test(NAME fsdp_whole_tests SOURCES ${TEST_DIR}/fsdp_whole_test.cpp LABELS dist COST 40)
