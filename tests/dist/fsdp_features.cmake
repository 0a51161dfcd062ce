accelerate_test(NAME fsdp_features_tests SOURCES ${TEST_DIR}/fsdp_features_test.cpp ${TEST_DIR}/fsdp_options_test.cpp LABELS dist COST 40 TIMEOUT 900)
