accelerate_test(NAME failures_tests SOURCES ${TEST_DIR}/failures_test.cpp ${TEST_DIR}/failing_jobs.cpp LABELS fault dist cli COST 120)
add_library(wild_clock SHARED ${TEST_DIR}/wild_clock.cpp)
set_target_properties(wild_clock PROPERTIES CXX_VISIBILITY_PRESET default LIBRARY_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
add_dependencies(failures_tests wild_clock accelerate_cli)
