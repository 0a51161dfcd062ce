# Everything that a user's find_package(accelerate) needs. include/ holds public headers only.
include(CMakePackageConfigHelpers)
install(TARGETS accelerate accelerate_launch accelerate_models EXPORT accelerateTargets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/accelerate DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp")
install(EXPORT accelerateTargets NAMESPACE accelerate:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/accelerateConfig.cmake.in ${CMAKE_BINARY_DIR}/accelerateConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/accelerateConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/accelerateConfig.cmake ${CMAKE_BINARY_DIR}/accelerateConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/accelerate)
