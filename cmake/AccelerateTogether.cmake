# accelerate_includes_of(source out): its lines with #include, those of files beside it with their folder: for a source that is included elsewhere, behind them.
function(accelerate_includes_of source out)
  cmake_path(GET source PARENT_PATH folder)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${source})
  file(STRINGS ${source} lines REGEX "^#include")
  set(includes "")
  foreach(line ${lines})
    if(line MATCHES "\"(.*)\"")
      if(EXISTS ${folder}/${CMAKE_MATCH_1})
        set(line "#include \"${folder}/${CMAKE_MATCH_1}\"")
      endif()
    endif()
    list(APPEND includes ${line})
  endforeach()
  set(${out} ${includes} PARENT_SCOPE)
endfunction()

# accelerate_together(target UNITS n [SERVED] PROGRAMS name source [name source …]): several programs as one with as many names: bin/ema is a link to bin/examples, and the name
# under which that is started says which of them runs. 6 of the 9 s that one of them takes to compile are templates that LibTorch's headers ask for whatever the
# source does; so they are compiled as that many sources, each program in a namespace of its own, after all that they include. For tests they end sooner where
# ACCELERATE_TEST_LEAVES_LIBTORCH is in the environment (src/utils/leave_libtorch.hpp), and their sockets wait without turning (src/utils/gloo_gives_way.hpp).
# SERVED: for tests each can be a server of itself (tests/support/program_server.hpp).
function(accelerate_together target)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "SERVED" "UNITS" "PROGRAMS")
  set(support ${PROJECT_SOURCE_DIR}/tests/support)
  set(served "")
  set(runs "return run(count, words);")
  if(ARG_SERVED)
    set(served "#include \"${support}/program_server.hpp\"")
    set(runs "return support::main_or_program_server(count, words, run);")
  endif()
  set(names "")
  while(ARG_PROGRAMS)
    list(POP_FRONT ARG_PROGRAMS name source)
    list(LENGTH names index)
    math(EXPR unit "${index} % ${ARG_UNITS}")
    list(APPEND names ${name})
    cmake_path(ABSOLUTE_PATH source NORMALIZE)
    accelerate_includes_of(${source} includes)
    list(APPEND includes_${unit} ${includes})
    string(APPEND bodies_${unit} "namespace program_${name} {\n#define main program_main\n#include \"${source}\"\n#undef main\n}\n")
    string(APPEND declarations "namespace program_${name} {\nint program_main(int, char**);\n}\n")
    string(APPEND table "    {\"${name}\", program_${name}::program_main},\n")
  endwhile()
  file(CONFIGURE OUTPUT ${target}_main.cpp @ONLY CONTENT "#include <cstdio>
#include <map>
#include <string>
#include \"@PROJECT_SOURCE_DIR@/src/utils/gloo_gives_way.hpp\"
#define ACCELERATE_LEAVES_LIBTORCH_IF \"ACCELERATE_TEST_LEAVES_LIBTORCH\"
#include \"@PROJECT_SOURCE_DIR@/src/utils/leave_libtorch.hpp\"
@served@
@declarations@
static int run(int count, char** words) {
  const std::map<std::string, int (*)(int, char**)> programs{
@table@  };
  const std::string path = words[0];
  const auto found = programs.find(path.substr(path.rfind('/') + 1));
  if (found != programs.end()) return found->second(count, words);
  std::fputs(\"@target@: this program runs under the name of one of those that it holds\\n\", stderr);
  return 64;
}
int main(int count, char** words) { @runs@ }
")
  add_executable(${target} ${CMAKE_CURRENT_BINARY_DIR}/${target}_main.cpp)
  if(ARG_SERVED)
    target_sources(${target} PRIVATE ${support}/program_server.cpp ${support}/process_server.cpp)
    set_source_files_properties(${support}/program_server.cpp ${support}/process_server.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  endif()
  math(EXPR last "${ARG_UNITS} - 1")
  foreach(unit RANGE ${last})
    list(REMOVE_DUPLICATES includes_${unit})
    list(JOIN includes_${unit} "\n" includes)
    file(CONFIGURE OUTPUT ${target}_${unit}.cpp CONTENT "${includes}\n${bodies_${unit}}" @ONLY)
    target_sources(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${target}_${unit}.cpp)
  endforeach()
  accelerate_use_pch(${target} quick)
  set_source_files_properties(${CMAKE_CURRENT_BINARY_DIR}/${target}_main.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  set_target_properties(${target} PROPERTIES UNITY_BUILD OFF)
  target_compile_options(${target} PRIVATE -Werror=return-type)  # only a real main() may end without
  foreach(name ${names})
    set(link ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
    add_custom_command(OUTPUT ${link} COMMAND ${CMAKE_COMMAND} -E rm -f ${link} COMMAND ${CMAKE_COMMAND} -E create_hardlink $<TARGET_FILE:${target}> ${link}
                       DEPENDS ${target} COMMENT "Program ${name}" VERBATIM)
    add_custom_target(${name} ALL DEPENDS ${link})
  endforeach()
endfunction()
