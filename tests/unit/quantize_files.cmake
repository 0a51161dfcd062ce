accelerate_test(NAME quantize_files_tests SOURCES ${TEST_DIR}/quantize_files_test.cpp LIBS accelerate_models LABELS unit COST 20)
