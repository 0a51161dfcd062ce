accelerate_test(NAME receipts_tests SOURCES ${TEST_DIR}/receipts_test.cpp LABELS dist COST 40)
add_dependencies(receipts_tests accelerate_agent accelerate_cli)
