accelerate_test(NAME fsdp_plugin_tests SOURCES ${TEST_DIR}/fsdp_plugin_test.cpp ${TEST_DIR}/fsdp_wrap_test.cpp LIBS accelerate_models nlohmann_json::nlohmann_json LABELS unit)
