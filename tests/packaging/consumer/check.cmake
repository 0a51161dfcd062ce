# cmake -DBUILD_DIR=... -DCONSUMER_DIR=... -P check.cmake: installs, configures, builds, runs; see packaging.cmake.
set(work ${BUILD_DIR}/packaging)
file(REMOVE_RECURSE ${work})

function(run what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code}):\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(require text pattern what)
  if(NOT text MATCHES "${pattern}")
    message(FATAL_ERROR "${what}: found\n${text}\nexpected a match of '${pattern}'")
  endif()
endfunction()

run("install" ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${work}/prefix)
file(GLOB_RECURSE foreign ${work}/prefix/include/*)
list(FILTER foreign EXCLUDE REGEX "/include/accelerate/.*\\.hpp$")
if(foreign)
  message(FATAL_ERROR "installed among the public headers: ${foreign}")
endif()

# The README's program, as it stands there.
file(READ ${CONSUMER_DIR}/../../../README.md readme)
string(REGEX MATCH "```cpp\n(.*)\n```\n\nTwo commands" found "${readme}")
if(NOT found)
  message(FATAL_ERROR "README.md shows no program (a block of cpp above 'Two commands')")
endif()
file(WRITE ${work}/build/main.cpp "#include \"my_dataset.hpp\"\n${CMAKE_MATCH_1}\n")

set(configure ${CMAKE_COMMAND} -S ${CONSUMER_DIR} -G ${GENERATOR} -DCMAKE_PREFIX_PATH=${work}/prefix -DCMAKE_BUILD_TYPE=${BUILD_TYPE}
    -DCMAKE_CXX_COMPILER=${CXX} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER})
run("configuring the consumer" ${configure} -B ${work}/build -DTorch_DIR=${TORCH_DIR})
run("building the consumer" ${CMAKE_COMMAND} --build ${work}/build)

# The installed program starts the consumer's.
foreach(start "" "${work}/prefix/bin/accelerate;launch;--cpu;--num_processes;2")
  file(REMOVE_RECURSE ${work}/run)
  file(MAKE_DIRECTORY ${work}/run)
  run("the README's program (${start})" ${CMAKE_COMMAND} -E chdir ${work}/run ${start} ${work}/build/consumer)
  if(NOT EXISTS ${work}/run/trained/model.safetensors)
    message(FATAL_ERROR "the README's program (${start}) saved no model:\n${output}")
  endif()
endforeach()
run("the consumer of the models" ${work}/build/models_consumer)
require("${output}" "parameters [0-9]+" "the consumer of the models")
run("the consumer of the launcher" ${work}/build/launch_consumer)

# A LibTorch of another version is refused with the two versions in the message, at configuration.
file(WRITE ${work}/other/TorchConfig.cmake "set(TORCH_FOUND TRUE)\n")
file(WRITE ${work}/other/TorchConfigVersion.cmake "set(PACKAGE_VERSION 1.0.0)\nset(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
execute_process(COMMAND ${configure} -B ${work}/build_other -DTorch_DIR=${work}/other RESULT_VARIABLE code OUTPUT_QUIET ERROR_VARIABLE output)
if(code EQUAL 0)
  message(FATAL_ERROR "find_package(accelerate) accepted LibTorch 1.0.0")
endif()
string(REGEX REPLACE "[ \n]+" " " output "${output}")
require("${output}" "was built with LibTorch [0-9.]+ but Torch_DIR leads to 1\\.0\\.0" "find_package(accelerate) with another LibTorch")
