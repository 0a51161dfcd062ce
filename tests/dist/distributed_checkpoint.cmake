accelerate_test(NAME distributed_checkpoint_tests SOURCES ${TEST_DIR}/distributed_checkpoint_test.cpp ${TEST_DIR}/dcp_layout_test.cpp LABELS dist COST 20)
