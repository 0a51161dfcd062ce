# Our readers and the Python packages, on the same damaged files.
add_executable(verdicts ${TEST_DIR}/verdicts.cpp)
target_include_directories(verdicts PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(verdicts PRIVATE accelerate_models accelerate nlohmann_json::nlohmann_json)
accelerate_quick(verdicts)
accelerate_test(NAME differential_tests SOURCES ${TEST_DIR}/differential_test.cpp LABELS fault NO_TORCH)
add_dependencies(differential_tests verdicts)
