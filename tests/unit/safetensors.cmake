accelerate_test(NAME safetensors_tests SOURCES ${TEST_DIR}/safetensors_test.cpp LABELS unit quick)
