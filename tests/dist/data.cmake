accelerate_test(NAME data_dist_tests SOURCES ${TEST_DIR}/data_test.cpp LABELS dist tsan)
