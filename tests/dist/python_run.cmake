accelerate_test(NAME python_run_tests SOURCES ${TEST_DIR}/python_run_test.cpp LIBS accelerate_models nlohmann_json::nlohmann_json LABELS dist COST 40 TIMEOUT 900)
