accelerate_test(NAME quantize_cli_tests SOURCES ${TEST_DIR}/quantize_cli_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH TIMEOUT 300)
add_dependencies(quantize_cli_tests accelerate_cli accelerate_quantize accelerate_generate)
