# The first step of `cmake --install`: builds what is missing of the target `installed` (AccelerateInstall.cmake), with as many compilers at a time as there are
# cores, and 2 GB of memory for each.
cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)  # MiB
math(EXPR jobs "${memory} / 2048")
if(jobs GREATER cores)
  set(jobs ${cores})
elseif(jobs LESS 1)
  set(jobs 1)
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${ACCELERATE_BUILD} --target installed --parallel ${jobs} RESULT_VARIABLE code)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "what is to be installed could not be built; the compiler's message is above")
endif()
