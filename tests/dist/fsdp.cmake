accelerate_test(NAME fsdp_tests SOURCES ${TEST_DIR}/fsdp_test.cpp LABELS dist TIMEOUT 300 AGAIN gathered ACCELERATE_SHARED_MEMORY=0)
