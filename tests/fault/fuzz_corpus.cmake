# Inputs that the fuzzers have found interesting, again with each compiler and sanitizer: fuzz/corpus holds the shortest that reach what they have reached.
# One program has all targets, each in a namespace of its own behind what all of them include: most of what compiling one takes is that.
function(accelerate_fuzz_corpus)
  set(fuzz_folder ${PROJECT_SOURCE_DIR}/fuzz)
  file(GLOB targets CONFIGURE_DEPENDS ${fuzz_folder}/*_fuzz.cpp)
  set(includes "#include \"${fuzz_folder}/replay.hpp\"" "#include <map>")
  set(bodies "")
  set(table "")
  foreach(source ${targets})
    accelerate_includes_of(${source} included)
    list(APPEND includes ${included})
    cmake_path(GET source STEM name)
    string(REGEX REPLACE "_fuzz$" "" name ${name})
    string(APPEND bodies "namespace ${name} {\n#define LLVMFuzzerTestOneInput input_of_${name}\n#include \"${source}\"\n#undef LLVMFuzzerTestOneInput\n}\n")
    string(APPEND table "    {\"${name}\", ${name}::input_of_${name}},\n")
    add_test(NAME fuzz_corpus.${name} COMMAND fuzz_replay ${name} ${fuzz_folder}/corpus/${name}.base64)
    set_tests_properties(fuzz_corpus.${name} PROPERTIES LABELS fault TIMEOUT 300)
    if(EXISTS /dev/shm)
      set_tests_properties(fuzz_corpus.${name} PROPERTIES ENVIRONMENT TMPDIR=/dev/shm)  # many small files, which a disk would write
    endif()
  endforeach()
  list(REMOVE_DUPLICATES includes)
  list(JOIN includes "\n" includes)
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/fuzz_targets.cpp @ONLY CONTENT "@includes@
@bodies@
FuzzTarget fuzz_target(const std::string& name) {
  const std::map<std::string, FuzzTarget> targets{
@table@  };
  const auto found = targets.find(name);
  return found == targets.end() ? nullptr : found->second;
}
")
  add_executable(fuzz_replay ${fuzz_folder}/replay.cpp ${CMAKE_CURRENT_BINARY_DIR}/fuzz_targets.cpp)
  target_include_directories(fuzz_replay PRIVATE ${fuzz_folder} ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/programs ${PROJECT_SOURCE_DIR}/tests/support)
  target_link_libraries(fuzz_replay PRIVATE accelerate_launch accelerate_sagemaker_parts accelerate_models accelerate nlohmann_json::nlohmann_json)
  accelerate_quick(fuzz_replay)
endfunction()
accelerate_fuzz_corpus()
