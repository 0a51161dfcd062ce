accelerate_test(NAME pipeline_tests SOURCES ${TEST_DIR}/pipeline_test.cpp LIBS accelerate_models LABELS dist COST 60 TIMEOUT 900)
