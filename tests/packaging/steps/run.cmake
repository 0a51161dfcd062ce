# The common part of the packaging tests: they are scripts, run by cmake -P with the variables of packaging.cmake.
cmake_minimum_required(VERSION 3.25)

# run(what command...): the command's output in `output`; fails with it.
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

# readme_program(file): the first program of the README, as it stands there, with what it leaves to its reader.
function(readme_program file)
  file(READ ${SOURCE_DIR}/README.md readme)
  string(FIND "${readme}" "#include <accelerate/accelerate.hpp>" begin)
  if(begin LESS 0)
    message(FATAL_ERROR "README.md shows no program with #include <accelerate/accelerate.hpp>")
  endif()
  string(SUBSTRING "${readme}" ${begin} -1 program)
  string(FIND "${program}" "\n```" end)
  string(SUBSTRING "${program}" 0 ${end} program)
  file(WRITE ${file} "#include \"my_dataset.hpp\"\n${program}\n")
endfunction()

# Unoptimised: what the programs compute is not the question.
set(configure ${CMAKE_COMMAND} -G ${GENERATOR} -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_CXX_COMPILER=${CXX}
    "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" "-DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER}")
