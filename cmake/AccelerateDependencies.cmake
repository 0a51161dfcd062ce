# LibTorch from the wheel (CMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')) or any Torch_DIR; the rest from system packages.
if(NOT PROJECT_IS_TOP_LEVEL)
  set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)  # what the libraries link must also be known where another project links them
endif()
find_package(Threads REQUIRED)
include(AccelerateTorch)
accelerate_find_torch(2.11 REQUIRED)
if(PROJECT_IS_TOP_LEVEL)
  # Programs find the LibTorch that they were linked with, by one path before and after they are installed: of two, CMake
  # fills up the shorter with empty entries, by which the loader looks for libraries in the current folder.
  set(CMAKE_INSTALL_RPATH ${TORCH_INSTALL_PREFIX}/lib)
  if(BUILD_SHARED_LIBS)
    list(PREPEND CMAKE_INSTALL_RPATH $ORIGIN/../lib)
  endif()
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
  set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
endif()
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(fmt REQUIRED)  # headers only (src/utils/raise.hpp); consumers of the library do not need it
include_directories(AFTER SYSTEM $<TARGET_PROPERTY:fmt::fmt,INTERFACE_INCLUDE_DIRECTORIES>)
find_path(SPDLOG_INCLUDE_DIR spdlog/spdlog.h REQUIRED)  # headers only, as with fmt: src/utils/log_output.cpp
find_package(ICU REQUIRED COMPONENTS uc data)  # data: what a static uc looks up
find_package(PCRE2 REQUIRED)
find_package(Liburing REQUIRED)  # past the system's cache of files: src/residency/disk
find_package(OpenSSL 3 REQUIRED)  # the token of jobs on several machines
if(ACCELERATE_SAGEMAKER)
  find_package(CURL 7.85 REQUIRED)  # older ones leave headers out of AWS signatures
  find_package(ZLIB REQUIRED)
endif()

# For programs that compute, in the place of the C library's allocator where it can be had: glibc's (until 2.38) can't put an aligned tensor into the place that one of the same size
# has left, so that a prompt's activations go on and on through memory. Sanitizers have an allocator of their own.
find_library(JEMALLOC_LIBRARY libjemalloc_pic.a)
add_library(accelerate_allocator INTERFACE)
if(JEMALLOC_LIBRARY AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  # mallctl: by which src/memory/huge_pages.cpp gives back what it keeps.
  target_link_libraries(accelerate_allocator INTERFACE ${JEMALLOC_LIBRARY} ${CMAKE_DL_LIBS} Threads::Threads)
  target_link_options(accelerate_allocator INTERFACE LINKER:--export-dynamic-symbol=mallctl)
endif()

# LibTorch holds the compiled code of c10d's back ends but the wheel leaves out Gloo's headers.
find_path(GLOO_INCLUDE_DIR gloo/config.h)
add_library(accelerate_c10d INTERFACE)
target_compile_definitions(accelerate_c10d INTERFACE USE_DISTRIBUTED)
include(CheckIncludeFileCXX)
set(ACCELERATE_HAS_GLOO OFF)
if(GLOO_INCLUDE_DIR)
  set(ACCELERATE_HAS_GLOO ON)
  target_include_directories(accelerate_c10d INTERFACE ${GLOO_INCLUDE_DIR})
  target_compile_definitions(accelerate_c10d INTERFACE USE_C10D_GLOO)
endif()
set(ACCELERATE_HAS_NCCL OFF)
set(ACCELERATE_HAS_NVRTC OFF)
if(TARGET torch_cuda)
  # Headers alone, of the CUDA toolkit or of NVIDIA's wheels beside LibTorch's. Only src/comm/backends/nccl.cpp,
  # src/model/cuda_graphs/cuda_recorder.cpp and src/codes/cuda/nvrtc.cpp see them.
  set(cuda_hints ${TORCH_INSTALL_PREFIX}/../nvidia/cu13/include ${TORCH_INSTALL_PREFIX}/../nvidia/nccl/include $ENV{CUDA_HOME}/include /usr/local/cuda/include)
  list(TRANSFORM cuda_hints APPEND /cccl OUTPUT_VARIABLE cccl_hints)
  foreach(header cuda_runtime_api.h crt/host_defines.h nv/target cublas_v2.h cusparse.h cusolverDn.h nccl.h)
    string(MAKE_C_IDENTIFIER "ACCELERATE_DIR_OF_${header}" folder)
    find_path(${folder} ${header} HINTS ${cuda_hints} ${cccl_hints})
    mark_as_advanced(${folder})
    if(${folder})
      list(APPEND ACCELERATE_CUDA_INCLUDE_DIRS ${${folder}})
    else()
      list(APPEND lacking ${header})
    endif()
  endforeach()
  # The kernels on codes need these two alone.
  find_path(ACCELERATE_DIR_OF_cuda_h cuda.h HINTS ${cuda_hints})
  find_path(ACCELERATE_DIR_OF_nvrtc_h nvrtc.h HINTS ${cuda_hints})
  mark_as_advanced(ACCELERATE_DIR_OF_cuda_h ACCELERATE_DIR_OF_nvrtc_h)
  if(ACCELERATE_DIR_OF_cuda_h AND ACCELERATE_DIR_OF_nvrtc_h)
    set(ACCELERATE_HAS_NVRTC ON)
    list(APPEND ACCELERATE_CUDA_INCLUDE_DIRS ${ACCELERATE_DIR_OF_cuda_h} ${ACCELERATE_DIR_OF_nvrtc_h})
  else()
    message(WARNING "cuda.h or nvrtc.h is not found, which come with LibTorch's nvidia-cuda-runtime and nvidia-cuda-nvrtc, or with a CUDA toolkit that CUDA_HOME names. "
                    "Without them weights in few bits are decoded by LibTorch's operators on GPUs, which saves no time.")
  endif()
  list(REMOVE_DUPLICATES ACCELERATE_CUDA_INCLUDE_DIRS)
  if(lacking)
    list(JOIN lacking ", " lacking)
    message(WARNING "This LibTorch is one for NVIDIA's GPUs, but these headers are not found: ${lacking}. Without them there are no CUDA graphs and no nccl, and processes on "
                    "several GPUs talk through gloo, by way of the host. pip's nvidia-cuda-crt and nvidia-cuda-cccl beside LibTorch (of nvidia-cuda-runtime's version) have what its "
                    "wheel lacks; CUDA_HOME names a CUDA toolkit.")
  else()
    set(ACCELERATE_HAS_NCCL ON)
  endif()
endif()
set(ACCELERATE_HAS_MPI OFF)
if(ACCELERATE_MPI)
  find_package(MPI REQUIRED COMPONENTS CXX)
  set(ACCELERATE_HAS_MPI ON)
  target_link_libraries(accelerate_c10d INTERFACE MPI::MPI_CXX)
  target_compile_definitions(accelerate_c10d INTERFACE USE_C10D_MPI)
endif()
message(STATUS "accelerate ${PROJECT_VERSION}: LibTorch ${Torch_VERSION}, back ends: gloo ${ACCELERATE_HAS_GLOO}, nccl ${ACCELERATE_HAS_NCCL}, mpi ${ACCELERATE_HAS_MPI}")
