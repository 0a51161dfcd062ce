accelerate_test(NAME safetensors_fault_tests SOURCES ${TEST_DIR}/safetensors_damage_test.cpp ${TEST_DIR}/safetensors_mutation_test.cpp LABELS fault)
