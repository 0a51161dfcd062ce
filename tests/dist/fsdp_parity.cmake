accelerate_test(NAME fsdp_parity_tests SOURCES ${TEST_DIR}/fsdp_parity_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 100 TIMEOUT 800)
