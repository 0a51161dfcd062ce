accelerate_test(NAME sagemaker_cli_tests SOURCES ${TEST_DIR}/sagemaker_cli_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_dependencies(sagemaker_cli_tests accelerate_cli accelerate_sagemaker)
accelerate_test(NAME tpu_cli_tests SOURCES ${TEST_DIR}/tpu_cli_test.cpp LIBS accelerate_launch LABELS cli NO_TORCH)
add_dependencies(tpu_cli_tests accelerate_cli)
