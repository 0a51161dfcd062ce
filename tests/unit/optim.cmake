accelerate_test(NAME optim_tests SOURCES ${TEST_DIR}/optim_test.cpp ${TEST_DIR}/scheduler_test.cpp ${TEST_DIR}/grad_scaler_test.cpp
                LIBS nlohmann_json::nlohmann_json LABELS unit)
