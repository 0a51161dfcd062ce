accelerate_test(NAME dcp_tests SOURCES ${TEST_DIR}/dcp_test.cpp ${TEST_DIR}/dcp_damage_test.cpp ${TEST_DIR}/dcp_python_test.cpp LIBS nlohmann_json::nlohmann_json LABELS unit COST 30)
