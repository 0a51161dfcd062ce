accelerate_test(NAME trackers_tests SOURCES ${TEST_DIR}/trackers_test.cpp ${TEST_DIR}/tracker_queue_test.cpp ${TEST_DIR}/tensorboard_test.cpp
                LIBS nlohmann_json::nlohmann_json LABELS unit tsan)
