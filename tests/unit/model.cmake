accelerate_test(NAME model_tests SOURCES ${TEST_DIR}/model_test.cpp LABELS unit)
