# What `cmake --install` installs besides the commands: the library, its headers, LibTorch if it
# is the clone's own, and the package that find_package(paceline) reads. All of it finds the rest
# relative to itself, so the prefix may be moved.

include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/paceline)

# Everything that is installed, except paceline-bench: it takes a minute to compile, and training does
# not need it, so it is a component of its own.
list(TRANSFORM PACELINE_MPIS PREPEND paceline_mpi_ OUTPUT_VARIABLE plugins)
if(TARGET paceline_nccl)
  list(APPEND plugins paceline_nccl)
endif()
add_custom_target(installed DEPENDS paceline_library paceline paceline-doctor ${plugins})

# Any other LibTorch belongs to the user, and is used where it is.
if(LibTorch_PREFIX STREQUAL LibTorch_FALLBACK)
  set(deps_dir ${CMAKE_INSTALL_LIBDIR}/paceline)
  set(installed_LibTorch "\${PACKAGE_PREFIX_DIR}/${deps_dir}/torch")
  set(LibTorch_rpath $ORIGIN/paceline/torch/lib)
  get_filename_component(deps ${LibTorch_PREFIX} DIRECTORY)
  # In the wheels' layout, where libtorch_cpu.so searches for the other libraries.
  set(torch_libraries libtorch_cpu.so libc10.so libgomp.so.1)
  set(nvidia_libraries libcudart.so.13 libcupti.so.13)
  list(TRANSFORM torch_libraries PREPEND ${deps}/torch/lib/)
  list(TRANSFORM nvidia_libraries PREPEND ${deps}/nvidia/cu13/lib/)
  install(FILES ${torch_libraries} DESTINATION ${deps_dir}/torch/lib)
  install(FILES ${nvidia_libraries} DESTINATION ${deps_dir}/nvidia/cu13/lib)
  # What DEVICE=cuda has installed.
  if(EXISTS ${deps}/nvidia/nccl)
    install(FILES ${deps}/torch/lib/libtorch_cuda.so ${deps}/torch/lib/libc10_cuda.so
                  ${deps}/torch/lib/libtorch_nvshmem.so ${deps}/torch/lib/libtorch_cuda_linalg.so
            DESTINATION ${deps_dir}/torch/lib)
    install(DIRECTORY ${deps}/nvidia DESTINATION ${deps_dir} FILES_MATCHING PATTERN "*.so*")
  endif()
  install(DIRECTORY ${deps}/torch/include DESTINATION ${deps_dir}/torch)
  file(GLOB licenses LIST_DIRECTORIES ON ${deps}/*.dist-info)
  install(DIRECTORY ${licenses} DESTINATION ${deps_dir}
          FILES_MATCHING REGEX "/licenses/.*")
else()
  set(installed_LibTorch ${LibTorch_PREFIX})
  set(LibTorch_rpath ${LibTorch_PREFIX}/lib)
endif()

set_target_properties(paceline_library PROPERTIES INSTALL_RPATH ${LibTorch_rpath})
file(RELATIVE_PATH library_dir /${CMAKE_INSTALL_LIBEXECDIR}/paceline /${CMAKE_INSTALL_LIBDIR})
string(REPLACE $ORIGIN $ORIGIN/${library_dir} rpath "${LibTorch_rpath}")
set_target_properties(paceline-doctor PROPERTIES INSTALL_RPATH "${rpath}")
if(TARGET paceline-bench)
  set_target_properties(paceline-bench PROPERTIES INSTALL_RPATH "${rpath}")
endif()
install(TARGETS paceline_library EXPORT paceline-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(plugins)
  install(TARGETS ${plugins} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/paceline)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/ ${PACELINE_GENERATED_INCLUDE_DIR}/
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
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
