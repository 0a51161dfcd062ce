accelerate_test(NAME zero_parity_tests SOURCES ${TEST_DIR}/zero_parity_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 60 TIMEOUT 800)
accelerate_test(NAME zero_tests SOURCES ${TEST_DIR}/zero_test.cpp LABELS dist COST 20 TIMEOUT 600)
accelerate_test(NAME zero_checkpoint_tests SOURCES ${TEST_DIR}/zero_checkpoint_test.cpp LIBS nlohmann_json::nlohmann_json LABELS dist COST 60 TIMEOUT 800)
accelerate_test(NAME zero_memory_tests SOURCES ${TEST_DIR}/zero_memory_test.cpp LABELS dist COST 10 TIMEOUT 300)
