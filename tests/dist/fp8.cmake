accelerate_test(NAME fp8_accelerator_tests SOURCES ${TEST_DIR}/fp8_settings_test.cpp ${TEST_DIR}/fp8_training_test.cpp LABELS dist COST 15)
