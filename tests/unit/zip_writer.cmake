accelerate_test(NAME zip_writer_tests SOURCES ${TEST_DIR}/zip_writer_test.cpp LABELS unit)
