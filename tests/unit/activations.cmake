accelerate_test(NAME activations_tests SOURCES ${TEST_DIR}/activations_test.cpp ${TEST_DIR}/activation_offload_test.cpp LABELS unit tsan)
