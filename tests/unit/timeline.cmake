accelerate_test(NAME timeline_tests SOURCES ${TEST_DIR}/timeline_test.cpp ${TEST_DIR}/timeline_report_test.cpp LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS unit quick NO_TORCH)
