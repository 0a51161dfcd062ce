accelerate_test(NAME monitor_cli_tests SOURCES ${TEST_DIR}/monitor_cli_test.cpp ${TEST_DIR}/screen.cpp ${TEST_DIR}/browser.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS cli NO_TORCH)
add_executable(monitor_rank ${TEST_DIR}/monitor_rank.cpp)
# A training program, and a library in place of the GPU driver's that the launcher finds by LD_LIBRARY_PATH.
accelerate_test_training(monitor_training)
add_library(fake_nvml SHARED ${TEST_DIR}/fake_nvml.cpp)
set_target_properties(fake_nvml PROPERTIES OUTPUT_NAME nvidia-ml SUFFIX .so.1 CXX_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/fake_nvml)
add_dependencies(monitor_cli_tests accelerate_cli accelerate_agent monitor_rank monitor_training fake_nvml)
