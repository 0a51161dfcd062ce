accelerate_test(NAME profiler_tests SOURCES ${TEST_DIR}/profiler_test.cpp LIBS nlohmann_json::nlohmann_json LABELS unit)
