find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME structure COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_includes.py --program $<TARGET_FILE:accelerate_cli>)
add_test(NAME structure.receipts COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_receipts.py)
add_test(NAME structure.layer COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_layer.py ${PROJECT_BINARY_DIR})
add_test(NAME structure.names COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_names.py)
add_test(NAME structure.inputs COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_inputs.py)
add_test(NAME structure.clocks COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_clocks.py)
add_test(NAME structure.times COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_times.py)
add_test(NAME format COMMAND ${PROJECT_SOURCE_DIR}/scripts/format.sh --check)
# Every option is in a test, and the faults that prove these tests (scripts/mutate.py, which takes an hour) fit the sources.
add_test(NAME structure.options COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_options.py)
add_test(NAME structure.mutations COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/mutate.py --check)
set_tests_properties(structure structure.receipts structure.names structure.inputs structure.clocks structure.times structure.options structure.mutations format PROPERTIES LABELS packaging TIMEOUT 60)
set_tests_properties(format PROPERTIES SKIP_RETURN_CODE 77)
# The files that only builds for NVIDIA's GPUs have; CI gets the headers for it (scripts/test.sh).
add_test(NAME structure.cuda COMMAND ${PROJECT_SOURCE_DIR}/scripts/cuda_build.sh --syntax)
add_test(NAME structure.nvrtc COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/nvrtc_check.py --quick)
set_tests_properties(structure.cuda structure.nvrtc PROPERTIES LABELS packaging TIMEOUT 600 SKIP_RETURN_CODE 77 ENVIRONMENT "CXX=${CMAKE_CXX_COMPILER};Torch_DIR=${Torch_DIR}")

set(settings -DBUILD_DIR=${PROJECT_BINARY_DIR} -DSOURCE_DIR=${PROJECT_SOURCE_DIR} -DTORCH_DIR=${Torch_DIR} -DGENERATOR=${CMAKE_GENERATOR}
             -DBUILD_TYPE=${CMAKE_BUILD_TYPE} -DCXX=${CMAKE_CXX_COMPILER} -DCXX_FLAGS=${CMAKE_CXX_FLAGS} -DLAUNCHER=$<$<BOOL:${CCACHE}>:${CCACHE}>)
foreach(way packages fetch_content)
  add_test(NAME packaging.${way} COMMAND ${CMAKE_COMMAND} ${settings} -DHERE=${TEST_DIR} -P ${TEST_DIR}/steps/${way}.cmake)
  set_tests_properties(packaging.${way} PROPERTIES LABELS packaging TIMEOUT 600 COST 60)
endforeach()

# An empty entry in a run path is the current folder, where anybody may have put a library.
add_test(NAME packaging.run_paths COMMAND sh -c "for program in *; do readelf -d $program 2>/dev/null | grep -E 'R(UN)?PATH.*(\\[:|::|:\\])' && echo FAILED: $program; done; \
readelf -d accelerate | grep -q NEEDED && echo looked at all" WORKING_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
set_tests_properties(packaging.run_paths PROPERTIES LABELS packaging TIMEOUT 60 FAIL_REGULAR_EXPRESSION "FAILED" PASS_REGULAR_EXPRESSION "looked at all")
set_tests_properties(structure.layer PROPERTIES LABELS packaging TIMEOUT 1200 COST 100)
