accelerate_test(NAME dry_run_tests SOURCES ${TEST_DIR}/dry_run_test.cpp LIBS accelerate_models LABELS unit)
