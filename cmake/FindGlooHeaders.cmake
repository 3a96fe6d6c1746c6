# Finds Gloo's headers (Debian: libgloo-dev). libtorch_cpu.so contains the library, but the wheel has
# no headers of it. Makes the target Gloo::headers, which also enables c10d's ProcessGroupGloo.hpp:
# link it only to the layer that includes that header.

find_path(GlooHeaders_INCLUDE_DIR gloo/transport/device.h)
mark_as_advanced(GlooHeaders_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(GlooHeaders REQUIRED_VARS GlooHeaders_INCLUDE_DIR)

if(GlooHeaders_FOUND AND NOT TARGET Gloo::headers)
  add_library(Gloo::headers INTERFACE IMPORTED)
  target_include_directories(Gloo::headers INTERFACE ${GlooHeaders_INCLUDE_DIR})
  target_compile_definitions(Gloo::headers INTERFACE USE_C10D_GLOO)
endif()
