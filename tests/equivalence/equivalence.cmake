# The fuzzer of docs/equivalence.md. A program with a main() of its own, whose ranks are itself.
file(GLOB equivalence_sources CONFIGURE_DEPENDS ${TEST_DIR}/*.cpp)
add_executable(equivalence ${equivalence_sources})
target_link_libraries(equivalence PRIVATE accelerate_test_main accelerate)
target_compile_definitions(equivalence PRIVATE ACCELERATE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
accelerate_use_pch(equivalence quick)
set_target_properties(equivalence PROPERTIES UNITY_BUILD OFF)
