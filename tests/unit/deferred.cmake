accelerate_test(NAME deferred_tests SOURCES ${TEST_DIR}/deferred_test.cpp ${TEST_DIR}/deferred_engine_test.cpp LABELS unit tsan)
