accelerate_test(NAME convert_cli_tests SOURCES ${TEST_DIR}/convert_cli_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_dependencies(convert_cli_tests accelerate_cli accelerate_convert)
