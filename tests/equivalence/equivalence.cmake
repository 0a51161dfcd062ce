# The fuzzer of docs/equivalence.md. A program with a main() of its own, whose ranks are itself.
file(GLOB equivalence_sources CONFIGURE_DEPENDS ${TEST_DIR}/*.cpp)
add_executable(equivalence ${equivalence_sources})
target_link_libraries(equivalence PRIVATE accelerate_test_main accelerate)
accelerate_use_pch(equivalence quick)
set_target_properties(equivalence PROPERTIES UNITY_BUILD_BATCH_SIZE 8)

# All cases that ever failed, then the first seeds without the names from before prepare(). With ACCELERATE_EQUIVALENCE_MINUTES instead of these so many minutes of
# fresh seeds of all kinds, from the commit's hash, which are printed.
set(fixed "--plain --count 40 --from 1")
set(fresh "--minutes $ACCELERATE_EQUIVALENCE_MINUTES --from $(git -C '${PROJECT_SOURCE_DIR}' rev-parse HEAD || echo none)")
add_test(NAME equivalence.fuzzer COMMAND sh -c "env -u ACCELERATE_EQUIVALENCE_MINUTES $<TARGET_FILE:equivalence> '${TEST_DIR}/cases' && if [ -n \"$ACCELERATE_EQUIVALENCE_MINUTES\" ]; then exec $<TARGET_FILE:equivalence> ${fresh}; else exec $<TARGET_FILE:equivalence> ${fixed}; fi")
set_tests_properties(equivalence.fuzzer PROPERTIES LABELS "dist;equivalence" COST 200 TIMEOUT 1800 ENVIRONMENT OMP_NUM_THREADS=1)
