accelerate_test(NAME checkpoint_tests SOURCES ${TEST_DIR}/checkpoint_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist quick)
