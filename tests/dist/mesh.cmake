accelerate_test(NAME mesh_tests SOURCES ${TEST_DIR}/mesh_test.cpp LABELS dist)
