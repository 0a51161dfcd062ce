accelerate_test(NAME columns_tests SOURCES ${TEST_DIR}/columns_test.cpp LABELS dist)
