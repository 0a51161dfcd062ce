# On a GPU, or skipped; ACCELERATE_GPU_REHEARSAL=1 runs what it can of them on the CPU. One after the other: they measure times and memory.
accelerate_test(NAME gpu_tests SOURCES ${TEST_DIR}/placement_test.cpp ${TEST_DIR}/streams_test.cpp ${TEST_DIR}/engines_test.cpp ${TEST_DIR}/precision_test.cpp ${TEST_DIR}/offload_test.cpp ${TEST_DIR}/big_model_test.cpp ${TEST_DIR}/checkpoint_test.cpp ${TEST_DIR}/memory_test.cpp ${TEST_DIR}/programs_test.cpp ${TEST_DIR}/../cli/program.cpp LIBS accelerate_models accelerate_launch nlohmann_json::nlohmann_json LABELS gpu ALONE TIMEOUT 300)
if(TARGET accelerate_cli)
  add_dependencies(gpu_tests accelerate_cli)
endif()
if(TARGET accelerate_self_test)
  add_dependencies(gpu_tests accelerate_self_test)
endif()
