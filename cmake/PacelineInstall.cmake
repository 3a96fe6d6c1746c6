# What `cmake --install` installs besides the commands in apps/: the library, its headers, and the
# package that find_package(paceline) reads.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/paceline)

# All of what is installed.
add_custom_target(installed DEPENDS paceline_library paceline)
foreach(program paceline-bench paceline-bench-openmpi)
  if(TARGET ${program})
    add_dependencies(installed ${program})
  endif()
endforeach()

install(TARGETS paceline_library EXPORT paceline-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT paceline-targets NAMESPACE paceline:: DESTINATION ${package_dir})

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/paceline-config.cmake.in
  ${PROJECT_BINARY_DIR}/paceline-config.cmake
  INSTALL_DESTINATION ${package_dir}
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(
  ${PROJECT_BINARY_DIR}/paceline-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(
  FILES ${PROJECT_BINARY_DIR}/paceline-config.cmake
        ${PROJECT_BINARY_DIR}/paceline-config-version.cmake
        ${PROJECT_SOURCE_DIR}/cmake/FindLibTorch.cmake
  DESTINATION ${package_dir})
