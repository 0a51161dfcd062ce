accelerate_test(NAME launch_cli_tests SOURCES ${TEST_DIR}/launch_cli_test.cpp LIBS accelerate_launch LABELS cli tsan NO_TORCH)
add_dependencies(launch_cli_tests accelerate_cli)
accelerate_test(NAME commands_tests SOURCES ${TEST_DIR}/commands_test.cpp LIBS accelerate_launch LABELS cli NO_TORCH)
add_dependencies(commands_tests accelerate_cli)
