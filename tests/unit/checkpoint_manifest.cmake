accelerate_test(NAME checkpoint_manifest_tests SOURCES ${TEST_DIR}/checkpoint_manifest_test.cpp ${TEST_DIR}/atomic_file_test.cpp LIBS nlohmann_json::nlohmann_json LABELS unit quick)
