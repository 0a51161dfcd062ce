accelerate_test(NAME convert_files_tests SOURCES ${TEST_DIR}/convert_files_test.cpp LABELS unit)
