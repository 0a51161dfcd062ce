accelerate_test(NAME residency_tests SOURCES ${TEST_DIR}/residency_test.cpp ${TEST_DIR}/residency_models_test.cpp ${TEST_DIR}/file_home_test.cpp ${TEST_DIR}/devices_test.cpp LABELS unit tsan)
