# A user's project that takes the library in as a part of itself. The launcher's library is built and a program linked with it; of the other, which
# takes minutes to build and is the same code, the README's program is compiled against its target.
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
run("building" ${CMAKE_COMMAND} --build ${work} --target launch_consumer consumer_objects)
run("the program with the launcher" ${work}/launch_consumer)
