# Several examples as one program with as many names: bin/ema is a link to bin/examples, and the name under which that is started says which of them runs. Of the
# 9 s that one of them takes to compile, 6 s are templates that LibTorch's headers ask for whatever the source does; so six at a time are compiled as one source,
# each in a namespace of its own, after all that they include.
set(num_units 6)
get_property(examples DIRECTORY PROPERTY EXAMPLES)
set(names "")
while(examples)
  list(POP_FRONT examples name source)
  list(LENGTH names index)
  math(EXPR unit "${index} % ${num_units}")
  list(APPEND names ${name})
  cmake_path(ABSOLUTE_PATH source NORMALIZE)
  cmake_path(GET source PARENT_PATH folder)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
  file(STRINGS ${source} includes REGEX "^#include")
  list(TRANSFORM includes REPLACE "\"(.*)\"" "\"${folder}/\\1\"")
  list(APPEND includes_${unit} ${includes})
  string(APPEND bodies_${unit} "namespace example_${name} {\n#define main example_main\n#include \"${source}\"\n#undef main\n}\n")
  string(APPEND declarations "namespace example_${name} {\nint example_main(int, char**);\n}\n")
  string(APPEND table "    {\"${name}\", example_${name}::example_main},\n")
endwhile()
file(CONFIGURE OUTPUT main.cpp @ONLY CONTENT "#include <cstdio>
#include <map>
#include <string>
@declarations@
int main(int count, char** words) {
  const std::map<std::string, int (*)(int, char**)> examples{
@table@  };
  const std::string path = words[0];
  const auto found = examples.find(path.substr(path.rfind('/') + 1));
  if (found != examples.end()) return found->second(count, words);
  std::fputs(\"examples: this program runs under the name of an example\\n\", stderr);
  return 64;
}
")
add_executable(examples ${CMAKE_CURRENT_BINARY_DIR}/main.cpp)
math(EXPR last "${num_units} - 1")
foreach(unit RANGE ${last})
  list(REMOVE_DUPLICATES includes_${unit})
  list(JOIN includes_${unit} "\n" includes)
  file(CONFIGURE OUTPUT unit_${unit}.cpp CONTENT "${includes}\n${bodies_${unit}}" @ONLY)
  target_sources(examples PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/unit_${unit}.cpp)
endforeach()
target_link_libraries(examples PRIVATE accelerate::accelerate accelerate::models nlohmann_json::nlohmann_json)
accelerate_use_pch(examples quick)
set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/main.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
set_target_properties(examples PROPERTIES UNITY_BUILD OFF)
foreach(name ${names})
  set(link ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
  add_custom_command(OUTPUT ${link} COMMAND ${CMAKE_COMMAND} -E rm -f ${link} COMMAND ${CMAKE_COMMAND} -E create_hardlink $<TARGET_FILE:examples> ${link}
                     DEPENDS examples COMMENT "Example ${name}" VERBATIM)
  add_custom_target(${name} ALL DEPENDS ${link})
endforeach()
