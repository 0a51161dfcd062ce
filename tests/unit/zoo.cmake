accelerate_test(NAME zoo_tests SOURCES ${TEST_DIR}/zoo_test.cpp LIBS accelerate_models LABELS unit COST 50 TIMEOUT 900)
