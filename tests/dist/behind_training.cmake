accelerate_test(NAME behind_training_tests SOURCES ${TEST_DIR}/behind_training_test.cpp LABELS dist tsan)
