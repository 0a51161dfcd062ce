accelerate_test(NAME save_on_signal_tests SOURCES ${TEST_DIR}/save_on_signal_test.cpp LABELS dist COST 20)
