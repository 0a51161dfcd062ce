# Language, output folders, warnings, compiler cache. Included once by the root.
include(GNUInstallDirs)
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# For programs too, which CMake would give -fPIE: GCC refuses a precompiled header that was made with the other one.
add_compile_options(-fPIC)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
add_compile_definitions(FMT_HEADER_ONLY=1)  # see src/utils/raise.hpp; for all targets, because precompiled headers must be made with it
if(BUILD_SHARED_LIBS)
  add_compile_definitions(ACCELERATE_SHARED=1)  # for src/utils/leave_libtorch.hpp
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
# Of our own folders only, also within another project.
add_compile_options(-Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers)
# From twice so many KiB on, GCC looks for memory that it no longer needs, and not from 256 MB on: LibTorch's headers take more, all of which stays, so it was a
# twentieth of its time for nothing. Sources take 10 % more memory.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=1250000>)
# False alarms of GCC 12 about "text" + std::to_string(n).
add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-restrict> $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow> $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds>)
if(CMAKE_UNITY_BUILD)
  # GCC takes a source that another one includes for a header, whose types had better not have members of anonymous ones.
  add_compile_options($<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
  set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)  # all sources of a target as one, where accelerate_unity does not divide them
  if(ACCELERATE_WERROR)
    add_compile_options(-Werror)
  endif()
  find_program(CCACHE ccache)
  if(CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # The sloppiness is what ccache needs to cache files that use a precompiled header; the base folder lets several build folders share results; with the cache
    # of inodes the 800 MB of a precompiled header are hashed once, not for each source.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 CCACHE_INODECACHE=1
        CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
    add_compile_options($<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  endif()
  find_program(MOLD mold)
  if(MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

# accelerate_quick(target): what mostly waits, or asks libraries to work, is compiled at -O1 in a release, too: in two thirds of the time of -O3.
function(accelerate_quick target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# accelerate_use_pch(target kind): LibTorch's headers, precompiled once per kind.
#   engine  what most of the library's files with models or collectives include anyway: 10 s a file instead of 20 s.
#   torch   all of <torch/torch.h>, for models and benchmarks.
#   quick   the same at -O1, which compiles in half the time: for programs, tests and examples, whose work is done by the libraries that they link. In unity
#           builds, where one change compiles most of a target anyway, <accelerate/accelerate.hpp>, too: 9 s a source that includes it instead of 14 s.
# GCC refuses a precompiled header that was made with other options, hence one per kind.
#
# In unity builds only what several sources share pays: the models are one source there, which begins with <torch/torch.h>.
set(ACCELERATE_PCH_engine <ATen/ATen.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp> <torch/nn/module.h>)
set(ACCELERATE_PCH_torch <torch/torch.h>)
set(ACCELERATE_PCH_quick <torch/torch.h>)
if(CMAKE_UNITY_BUILD)
  list(APPEND ACCELERATE_PCH_quick <accelerate/accelerate.hpp>)
endif()
function(accelerate_use_pch target kind)
  if(kind STREQUAL "quick")
    accelerate_quick(${target})
  endif()
  if(ACCELERATE_PCH AND NOT (kind STREQUAL "torch" AND CMAKE_UNITY_BUILD))
    set(pch accelerate_pch_${kind})
    if(NOT TARGET ${pch})
      file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/${pch}.cpp CONTENT "")
      add_library(${pch} OBJECT EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/${pch}.cpp)
      target_link_libraries(${pch} PRIVATE torch $<BUILD_INTERFACE:accelerate_c10d>)
      if(kind STREQUAL "quick")
        accelerate_quick(${pch})
        target_include_directories(${pch} PRIVATE ${PROJECT_SOURCE_DIR}/include)
      endif()
      target_precompile_headers(${pch} PRIVATE ${ACCELERATE_PCH_${kind}})
    endif()
    target_precompile_headers(${target} REUSE_FROM ${pch})
  endif()
endfunction()

# accelerate_unity(target): where the preset asks for unity builds (CMAKE_UNITY_BUILD), the sources of each module in src/, of each folder elsewhere, are compiled
# as one. Most of what compiling a source takes is reading what all of them include: four models one by one take 88 s, together 28 s.
function(accelerate_unity target)
  if(NOT CMAKE_UNITY_BUILD)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE place)  # the project may itself lie in a folder src
    if(place MATCHES "^src/([a-z_]+)/")
      string(REGEX REPLACE "^(input|memory|network|observe)$" "utils" group ${CMAKE_MATCH_1})  # small ones together
      set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${group})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
endfunction()
