# The fuzzer of docs/equivalence.md. A program with a main() of its own, whose ranks are itself.
file(GLOB equivalence_sources CONFIGURE_DEPENDS ${TEST_DIR}/*.cpp)
add_executable(equivalence ${equivalence_sources})
target_link_libraries(equivalence PRIVATE accelerate_test_main accelerate)
target_compile_definitions(equivalence PRIVATE ACCELERATE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
accelerate_use_pch(equivalence quick)
set_target_properties(equivalence PROPERTIES UNITY_BUILD OFF)

# All cases that ever failed, then 3 minutes (ACCELERATE_EQUIVALENCE_MINUTES) of seeds from the commit's hash, which are printed.
add_test(NAME equivalence.fuzzer COMMAND sh -c "exec $<TARGET_FILE:equivalence> '${TEST_DIR}/cases' --minutes \"\${ACCELERATE_EQUIVALENCE_MINUTES:-3}\" --from \"$(git -C '${PROJECT_SOURCE_DIR}' rev-parse HEAD || echo none)\"")
set_tests_properties(equivalence.fuzzer PROPERTIES LABELS "dist;equivalence" COST 200 TIMEOUT 1800 ENVIRONMENT OMP_NUM_THREADS=1)
