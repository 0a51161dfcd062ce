accelerate_test(NAME communication_hooks_tests SOURCES ${TEST_DIR}/communication_hooks_test.cpp ${TEST_DIR}/local_sgd_test.cpp
  LIBS nlohmann_json::nlohmann_json LABELS dist COST 40)
