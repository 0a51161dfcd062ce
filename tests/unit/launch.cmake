accelerate_test(NAME launch_tests SOURCES ${TEST_DIR}/launch_test.cpp ${TEST_DIR}/coordinator_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS unit cli tsan quick NO_TORCH)
