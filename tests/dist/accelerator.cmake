accelerate_test(NAME accelerator_tests SOURCES ${TEST_DIR}/accelerator_test.cpp LABELS dist)
