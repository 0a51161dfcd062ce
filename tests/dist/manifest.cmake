accelerate_test(NAME manifest_tests SOURCES ${TEST_DIR}/manifest_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 20)
accelerate_test(NAME full_disk_tests SOURCES ${TEST_DIR}/full_disk_test.cpp LABELS dist APART)
