accelerate_test(NAME estimate_memory_cli_tests SOURCES ${TEST_DIR}/estimate_memory_cli_test.cpp ${TEST_DIR}/program.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_dependencies(estimate_memory_cli_tests accelerate_cli accelerate_estimate_training)
