accelerate_test(NAME profile_cli_tests SOURCES ${TEST_DIR}/profile_cli_test.cpp ${TEST_DIR}/browser.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
accelerate_test_training(profile_training)
add_dependencies(profile_cli_tests accelerate_cli profile_training)
