# Finds Gloo's headers (Debian: libgloo-dev). The library itself is part of libtorch_cpu.so; only
# its headers are missing there. Makes the target Gloo::headers, which also switches on c10d's
# ProcessGroupGloo.hpp: link it to nothing but the layer that includes that header.

find_path(GlooHeaders_INCLUDE_DIR gloo/transport/device.h)
mark_as_advanced(GlooHeaders_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(GlooHeaders REQUIRED_VARS GlooHeaders_INCLUDE_DIR)

if(GlooHeaders_FOUND AND NOT TARGET Gloo::headers)
  add_library(Gloo::headers INTERFACE IMPORTED)
  target_include_directories(Gloo::headers INTERFACE ${GlooHeaders_INCLUDE_DIR})
  target_compile_definitions(Gloo::headers INTERFACE USE_C10D_GLOO)
endif()
