accelerate_test(NAME ddp_tests SOURCES ${TEST_DIR}/ddp_test.cpp LABELS dist quick COST 30)
