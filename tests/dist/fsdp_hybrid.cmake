accelerate_test(NAME fsdp_hybrid_tests SOURCES ${TEST_DIR}/fsdp_hybrid_test.cpp LABELS dist COST 40 TIMEOUT 900)
