accelerate_test(NAME generate_cli_tests SOURCES ${TEST_DIR}/generate_cli_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH TIMEOUT 300)
add_dependencies(generate_cli_tests accelerate_cli accelerate_generate)
