# LibTorch: the targets `torch` and, in builds for NVIDIA's GPUs, `torch_cuda`; Torch_VERSION and TORCH_INSTALL_PREFIX.
#
# LibTorch's own package of such a build asks for the whole CUDA toolkit and its compiler, which nothing here is compiled with: the wheel, and the wheels of
# NVIDIA's libraries that pip installs beside it, hold all that there is to link. So these are linked as they lie there. Part of the installed package, too.
macro(accelerate_find_torch)
  find_path(Torch_DIR TorchConfig.cmake PATH_SUFFIXES share/cmake/Torch Torch DOC "Folder of LibTorch's TorchConfig.cmake")
  get_filename_component(TORCH_INSTALL_PREFIX "${Torch_DIR}/../../.." ABSOLUTE)
  if(TARGET torch OR NOT EXISTS ${TORCH_INSTALL_PREFIX}/lib/libtorch_cuda.so)
    find_package(Torch ${ARGN})
  else()
    set(PACKAGE_FIND_VERSION 0)
    include(${Torch_DIR}/TorchConfigVersion.cmake)
    set(Torch_VERSION ${PACKAGE_VERSION})
    set(Torch_FOUND TRUE)
    set(_torch_asked ${ARGN})
    list(GET _torch_asked 0 _torch_least)
    if(_torch_least MATCHES "^[0-9]" AND Torch_VERSION VERSION_LESS _torch_least)
      message(FATAL_ERROR "Torch_DIR is ${Torch_DIR}, which is LibTorch ${Torch_VERSION}; ${_torch_least} or newer is needed.")
    endif()
    set(_torch_names c10 torch_cpu)
    set(_torch_links torch_cpu c10)
    if(NOT DEFINED ACCELERATE_CUDA OR ACCELERATE_CUDA)
      list(APPEND _torch_names c10_cuda torch_cuda)
      # Of libtorch_cuda.so nothing is called by name; it brings the kernels when it is loaded.
      set(_torch_links "-Wl,--no-as-needed;torch_cuda;-Wl,--as-needed;torch_cpu;c10_cuda;c10")
    endif()
    foreach(_torch_name ${_torch_names})
      add_library(${_torch_name} SHARED IMPORTED GLOBAL)
      set_target_properties(${_torch_name} PROPERTIES IMPORTED_LOCATION ${TORCH_INSTALL_PREFIX}/lib/lib${_torch_name}.so)
    endforeach()
    # The loader finds by their own paths what the libraries themselves need, and linkers need not look at it.
    add_library(torch INTERFACE IMPORTED GLOBAL)
    set_target_properties(torch PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES "${TORCH_INSTALL_PREFIX}/include;${TORCH_INSTALL_PREFIX}/include/torch/csrc/api/include"
      INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"  # as LibTorch's package says
      INTERFACE_LINK_LIBRARIES "${_torch_links}"
      INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
  endif()
endmacro()
