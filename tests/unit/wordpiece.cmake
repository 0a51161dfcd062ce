accelerate_test(NAME wordpiece_tests SOURCES ${TEST_DIR}/wordpiece_test.cpp LIBS accelerate_models nlohmann_json::nlohmann_json LABELS unit)
