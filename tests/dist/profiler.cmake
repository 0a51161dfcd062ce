accelerate_test(NAME profiled_ranks_tests SOURCES ${TEST_DIR}/profiler_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist)
