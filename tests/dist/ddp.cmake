accelerate_test(NAME ddp_tests SOURCES ${TEST_DIR}/ddp_test.cpp LABELS dist quick COST 30)
accelerate_test(NAME ddp_habits_tests SOURCES ${TEST_DIR}/ddp_habits_test.cpp LABELS dist COST 30)
