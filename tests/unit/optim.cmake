accelerate_test(NAME optim_tests SOURCES ${TEST_DIR}/optim_test.cpp ${TEST_DIR}/scheduler_test.cpp ${TEST_DIR}/grad_scaler_test.cpp
                LIBS nlohmann_json::nlohmann_json LABELS unit)
accelerate_test(NAME schedule_free_tests SOURCES ${TEST_DIR}/schedule_free_test.cpp LABELS unit)
accelerate_test(NAME adam8bit_tests SOURCES ${TEST_DIR}/adam8bit_test.cpp LABELS unit)
accelerate_test(NAME deepspeed_optim_tests SOURCES ${TEST_DIR}/deepspeed_schedules_test.cpp ${TEST_DIR}/loss_scale_test.cpp ${TEST_DIR}/lion_lamb_muon_test.cpp LABELS unit)
