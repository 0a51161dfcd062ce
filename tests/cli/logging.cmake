accelerate_test(NAME logging_cli_tests SOURCES ${TEST_DIR}/logging_cli_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_executable(log_rank ${TEST_DIR}/log_rank.cpp)
target_link_libraries(log_rank PRIVATE accelerate)
add_dependencies(logging_cli_tests accelerate_cli log_rank)
