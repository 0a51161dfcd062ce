accelerate_test(NAME summary_tests SOURCES ${TEST_DIR}/summary_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist)
