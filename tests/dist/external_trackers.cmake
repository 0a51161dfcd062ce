accelerate_test(NAME external_trackers_tests SOURCES ${TEST_DIR}/dvclive_test.cpp ${TEST_DIR}/mlflow_test.cpp ${TEST_DIR}/python_tracker_test.cpp
                ${TEST_DIR}/tracker_services_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 60)
add_dependencies(external_trackers_tests accelerate_cli accelerate_track)
