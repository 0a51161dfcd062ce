accelerate_test(NAME machines_fault_tests SOURCES ${TEST_DIR}/machines_test.cpp LIBS accelerate_launch LABELS fault cli NO_TORCH WAITS COST 30)
add_dependencies(machines_fault_tests accelerate_cli accelerate_agent)
