accelerate_test(NAME monitor_tests SOURCES ${TEST_DIR}/monitor_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS unit NO_TORCH)
