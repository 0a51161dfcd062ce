accelerate_test(NAME machines_fault_tests SOURCES ${TEST_DIR}/machines_test.cpp ${TEST_DIR}/../cli/program.cpp LIBS accelerate_launch LABELS fault cli NO_TORCH ALONE)
target_include_directories(machines_fault_tests PRIVATE ${TEST_DIR}/../cli)
add_dependencies(machines_fault_tests accelerate_cli accelerate_agent)
