accelerate_test(NAME contract_tests SOURCES ${TEST_DIR}/contract_test.cpp LABELS dist)
