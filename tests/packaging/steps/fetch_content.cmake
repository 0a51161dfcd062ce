# A user's project that takes the library in as a part of itself. It is the code that the tests' own build compiles, so a part shows that it compiles there, too: a
# module of the launcher's library, and programs against both libraries' targets. How these are linked is looked at, and done by the packages' test.
include(${HERE}/steps/run.cmake)
set(work ${BUILD_DIR}/fetch_content)
file(REMOVE_RECURSE ${work})
readme_program(${work}/main.cpp)
# Many keep sources in a folder src, as this project does its own.
file(MAKE_DIRECTORY ${work}/src)
file(CREATE_LINK ${SOURCE_DIR} ${work}/src/accelerate SYMBOLIC)
run("configuring" ${configure} -S ${HERE}/fetch_content -B ${work} -DFETCHCONTENT_SOURCE_DIR_ACCELERATE=${work}/src/accelerate -DTorch_DIR=${TORCH_DIR}
    -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0)
file(GLOB_RECURSE module RELATIVE ${work} ${work}/unity_launch_cxx.cxx)
if(NOT module)
  message(FATAL_ERROR "in a folder src, the sources of each module are not compiled as one")
endif()
file(GLOB_RECURSE module RELATIVE ${work} ${work}/unity_timeline_cxx.cxx)
string(REPLACE "/Unity/unity_timeline_cxx.cxx" "/Unity/unity_timeline_cxx.cxx.o" module "${module}")
run("building" ${CMAKE_COMMAND} --build ${work} --target ${module} launch_objects consumer_objects)
file(STRINGS ${work}/build.ninja output REGEX "^build launch_consumer:")
require("${output}" "libaccelerate_launch\\.a" "what the program with the launcher is linked from")
