# accelerate_layer_settings(root out): writes the source that knows the settings of all layers below `root`: each src/parallel/NAME/settings.cpp defines
# settings_of_NAME(). Also as a script: cmake -DROOT=... -DOUT=... -P AccelerateLayers.cmake
function(accelerate_layer_settings root out)
  file(GLOB sources ${root}/src/parallel/*/settings.cpp)
  set(declarations "")
  set(calls "")
  foreach(source ${sources})
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(GET folder FILENAME layer)
    string(APPEND declarations "OptionGroup settings_of_${layer}();\n")
    list(APPEND calls "settings_of_${layer}()")
  endforeach()
  list(JOIN calls ", " calls)
  file(CONFIGURE OUTPUT ${out} @ONLY CONTENT [[
#include "config/layer_settings.hpp"
namespace accelerate::config {
@declarations@std::vector<OptionGroup> layer_settings() { return {@calls@}; }
}  // namespace accelerate::config
]])
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  accelerate_layer_settings(${ROOT} ${OUT})
endif()
