accelerate_test(NAME fsdp_state_tests SOURCES ${TEST_DIR}/fsdp_state_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 60 TIMEOUT 900)
