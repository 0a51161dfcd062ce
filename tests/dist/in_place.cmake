accelerate_test(NAME in_place_tests SOURCES ${TEST_DIR}/in_place_test.cpp LABELS dist)
