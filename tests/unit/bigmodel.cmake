accelerate_test(NAME estimate_tests SOURCES ${TEST_DIR}/estimate_test.cpp $<TARGET_OBJECTS:accelerate_sizes> LIBS accelerate_launch nlohmann_json::nlohmann_json LABELS unit NO_TORCH)
accelerate_test(NAME bigmodel_tests SOURCES ${TEST_DIR}/bigmodel_test.cpp ${TEST_DIR}/dispatch_test.cpp ${TEST_DIR}/dispatch_limit_test.cpp ${TEST_DIR}/loading_test.cpp ${TEST_DIR}/offload_test.cpp ${TEST_DIR}/torch_files_test.cpp LIBS nlohmann_json::nlohmann_json LABELS unit)
accelerate_test(NAME dispatch_models_tests SOURCES ${TEST_DIR}/dispatch_models_test.cpp LIBS accelerate_models LABELS unit)
