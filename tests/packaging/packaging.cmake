# Includes follow the arrows of ARCHITECTURE.md, and the launcher is linked without LibTorch.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME structure COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/scripts/check_includes.py --program $<TARGET_FILE:accelerate_cli>)
set_tests_properties(structure PROPERTIES LABELS packaging TIMEOUT 60)

# Installs this build and builds a separate project against what was installed.
add_test(NAME packaging COMMAND ${CMAKE_COMMAND} -DBUILD_DIR=${PROJECT_BINARY_DIR} -DCONSUMER_DIR=${TEST_DIR}/consumer -DTORCH_DIR=${Torch_DIR}
         -DGENERATOR=${CMAKE_GENERATOR} -DBUILD_TYPE=${CMAKE_BUILD_TYPE} -DCXX=${CMAKE_CXX_COMPILER} -DCXX_FLAGS=${CMAKE_CXX_FLAGS}
         -DLAUNCHER=$<$<BOOL:${CCACHE}>:${CCACHE}> -P ${TEST_DIR}/consumer/check.cmake)
set_tests_properties(packaging PROPERTIES LABELS packaging TIMEOUT 600)
