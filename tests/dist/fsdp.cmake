accelerate_test(NAME fsdp_tests SOURCES ${TEST_DIR}/fsdp_test.cpp LABELS dist COST 40 TIMEOUT 900 AGAIN gathered ACCELERATE_SHARED_MEMORY=0)
