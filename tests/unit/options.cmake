# Options that other suites do not hand over, each by what it changes (scripts/check_options.py asks for one test per field).
accelerate_test(NAME options_tests SOURCES ${TEST_DIR}/options_bigmodel_test.cpp ${TEST_DIR}/options_models_test.cpp ${TEST_DIR}/options_training_test.cpp
                LIBS accelerate_models LABELS unit)
