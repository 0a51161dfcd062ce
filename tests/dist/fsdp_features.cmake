accelerate_test(NAME fsdp_features_tests SOURCES ${TEST_DIR}/fsdp_features_test.cpp LABELS dist TIMEOUT 300)
