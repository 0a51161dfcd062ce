accelerate_test(NAME launch_cli_tests SOURCES ${TEST_DIR}/launch_cli_test.cpp ${TEST_DIR}/program.cpp LIBS accelerate_launch LABELS cli tsan NO_TORCH)
add_dependencies(launch_cli_tests accelerate_cli)
