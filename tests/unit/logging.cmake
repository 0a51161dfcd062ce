accelerate_test(NAME logging_tests SOURCES ${TEST_DIR}/logging_test.cpp LIBS nlohmann_json::nlohmann_json LABELS unit dist tsan)
accelerate_test(NAME debugging_tests SOURCES ${TEST_DIR}/debugging_test.cpp LABELS unit dist)
