# Everything that a user's find_package(accelerate) needs, and packages of it. include/ holds public headers only.
include(CMakePackageConfigHelpers)
install(TARGETS accelerate accelerate_launch accelerate_models EXPORT accelerateTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/accelerate DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(EXPORT accelerateTargets NAMESPACE accelerate:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/accelerateConfig.cmake.in ${CMAKE_BINARY_DIR}/accelerateConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/accelerateConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/accelerateConfig.cmake ${CMAKE_BINARY_DIR}/accelerateConfigVersion.cmake
              ${CMAKE_CURRENT_LIST_DIR}/AccelerateTorch.cmake ${CMAKE_CURRENT_LIST_DIR}/FindPCRE2.cmake ${CMAKE_CURRENT_LIST_DIR}/FindLiburing.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
install(FILES ${PROJECT_SOURCE_DIR}/README.md ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Builds what `cmake --install` copies, and nothing else: `cmake --build … --target installed`.
add_custom_target(installed DEPENDS accelerate accelerate_launch accelerate_models accelerate_cli accelerate_convert accelerate_merge_weights accelerate_ds_to_universal accelerate_self_test
                  accelerate_estimate_training accelerate_generate accelerate_quantize accelerate_track accelerate_agent $<TARGET_NAME_IF_EXISTS:accelerate_sagemaker>)

# `cpack` in the build folder makes a .deb and a .tar.gz. LibTorch is no Debian package: the description names the version, and programs look for it where
# it was when they were linked, then in LD_LIBRARY_PATH.
if(PROJECT_IS_TOP_LEVEL)
  set(CPACK_GENERATOR DEB TGZ)
  set(CPACK_PACKAGE_NAME accelerate-cpp)
  set(CPACK_PACKAGE_VENDOR "Accelerate for C++")
  set(CPACK_PACKAGE_CONTACT "Accelerate for C++")
  set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Training and inference of LibTorch programs on any number of processes")
  set(CPACK_PACKAGE_DESCRIPTION "The `accelerate` program, and the library for find_package(accelerate): data parallelism, sharding, big models, checkpoints.
Needs LibTorch ${Torch_VERSION}, which no Debian package holds: the wheel of `pip install torch==${Torch_VERSION}` or any folder with TorchConfig.cmake.
Programs find it where it was when they were built (${TORCH_INSTALL_PREFIX}), else through LD_LIBRARY_PATH; CMake by Torch_DIR.")
  set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
  set(CPACK_PACKAGE_FILE_NAME accelerate-cpp-${PROJECT_VERSION}-${CMAKE_SYSTEM_PROCESSOR})
  set(CPACK_PACKAGE_DIRECTORY ${CMAKE_BINARY_DIR}/packages)
  set(CPACK_STRIP_FILES ON)
  # Archives of objects can't be stripped of what a linker needs, so only programs are.
  set(CPACK_DEBIAN_FILE_NAME ${CPACK_PACKAGE_FILE_NAME}.deb)
  set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)  # a seventh of gzip's time; Debian 12's dpkg and Ubuntu's read it
  set(CPACK_DEBIAN_PACKAGE_SECTION science)
  # Libraries of programs, and what a program that links the library needs. Named by hand: dpkg-shlibdeps would look for a package of LibTorch.
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libyaml-cpp-dev, libicu-dev, libpcre2-dev, liburing-dev, libssl3, libcurl4, zlib1g")
  set(CPACK_DEBIAN_PACKAGE_SUGGESTS "openmpi-bin, pdsh, openssh-client")
  include(CPack)
endif()
