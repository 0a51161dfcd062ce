# A user's project that takes the library in as a part of itself. The launcher's library is built and a program linked with it; of the other, which
# takes minutes to build and is the same code, the README's program is compiled against its target.
include(${HERE}/steps/run.cmake)
set(work ${BUILD_DIR}/fetch_content)
file(REMOVE_RECURSE ${work})
readme_program(${work}/main.cpp)
run("configuring" ${configure} -S ${HERE}/fetch_content -B ${work} -DFETCHCONTENT_SOURCE_DIR_ACCELERATE=${SOURCE_DIR} -DTorch_DIR=${TORCH_DIR}
    -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0)
run("building" ${CMAKE_COMMAND} --build ${work} --target launch_consumer consumer_objects)
run("the program with the launcher" ${work}/launch_consumer)
