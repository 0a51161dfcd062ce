accelerate_test(NAME data_tests SOURCES ${TEST_DIR}/data_batch_test.cpp ${TEST_DIR}/data_sampler_test.cpp ${TEST_DIR}/data_loader_test.cpp ${TEST_DIR}/data_prepared_test.cpp LABELS unit tsan quick)
