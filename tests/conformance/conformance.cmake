# One program runs all JSON cases; every file is a ctest case.
file(GLOB conformance_sources CONFIGURE_DEPENDS ${TEST_DIR}/*.cpp)
add_executable(conformance_tests ${conformance_sources} ${PROJECT_SOURCE_DIR}/cli/arguments.cpp)
target_link_libraries(conformance_tests PRIVATE accelerate_test_main accelerate accelerate_launch nlohmann_json::nlohmann_json)
target_compile_definitions(conformance_tests PRIVATE
  CONFORMANCE_CASES="${TEST_DIR}/cases" CONFORMANCE_DIFFERING="${TEST_DIR}/differing"
  CONFORMANCE_PAGE="${PROJECT_SOURCE_DIR}/docs/differences.md")
accelerate_use_pch(conformance_tests quick)
file(GLOB conformance_cases CONFIGURE_DEPENDS ${TEST_DIR}/cases/*.json)
foreach(case ${conformance_cases})
  cmake_path(GET case STEM name)
  add_test(NAME conformance.${name} COMMAND conformance_tests --cases ${TEST_DIR}/cases --only ${name})
  set_tests_properties(conformance.${name} PROPERTIES LABELS conformance TIMEOUT 300)
endforeach()
# The runner itself, on lists of rows that are right and wrong.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME conformance.runner
  COMMAND Python3::Interpreter ${TEST_DIR}/check_runner.py $<TARGET_FILE:conformance_tests> ${TEST_DIR}/cases)
set_tests_properties(conformance.runner PROPERTIES LABELS conformance TIMEOUT 120)
