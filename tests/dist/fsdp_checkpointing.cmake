accelerate_test(NAME fsdp_checkpointing_tests SOURCES ${TEST_DIR}/fsdp_checkpointing_test.cpp LABELS dist TIMEOUT 900)
