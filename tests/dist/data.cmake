accelerate_test(NAME data_dist_tests SOURCES ${TEST_DIR}/data_test.cpp LABELS dist tsan)
target_include_directories(data_dist_tests PRIVATE ${PROJECT_SOURCE_DIR}/tests/unit)
