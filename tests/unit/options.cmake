# Options that no other suite hands over, each by what it changes.
accelerate_test(NAME options_tests
                SOURCES ${TEST_DIR}/options_bigmodel_test.cpp ${TEST_DIR}/options_models_test.cpp ${TEST_DIR}/options_training_test.cpp
                LIBS accelerate_models LABELS unit)
