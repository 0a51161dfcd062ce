# Without LibTorch's precompiled header: what these plugins are made of compiles in seconds.
accelerate_test(NAME plugins_tests SOURCES ${TEST_DIR}/deepspeed_plugin_test.cpp ${TEST_DIR}/parallelism_config_test.cpp ${TEST_DIR}/settings_fields_test.cpp ${TEST_DIR}/zero_settings_test.cpp LIBS accelerate nlohmann_json::nlohmann_json LABELS unit NO_TORCH)
