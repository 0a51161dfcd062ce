accelerate_test(NAME inspect_cli_tests SOURCES ${TEST_DIR}/inspect_cli_test.cpp $<TARGET_OBJECTS:accelerate_headers> LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_dependencies(inspect_cli_tests accelerate_cli)
