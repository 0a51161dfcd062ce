accelerate_test(NAME model_tests SOURCES ${TEST_DIR}/model_test.cpp LABELS unit)
accelerate_test(NAME compiled_model_tests SOURCES ${TEST_DIR}/compiled_model_test.cpp LABELS unit)
accelerate_test(NAME cuda_graph_tests SOURCES ${TEST_DIR}/cuda_graph_test.cpp LABELS unit)
