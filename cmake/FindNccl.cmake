# Finds what compiling against LibTorch's NCCL backend needs: the headers of NCCL and of CUDA, in a CUDA toolkit or in
# NVIDIA's packages for Python beside LibTorch, and a LibTorch with CUDA (LibTorch::cuda). Makes the target Nccl::headers,
# which also enables c10d's ProcessGroupNCCL.hpp, and sets Nccl_VERSION (major and minor). Nothing is linked to NCCL: libtorch_cuda.so is.

# Those beside LibTorch have the version that it was built with. Nothing is cached, so a later configure sees what has
# been installed since.
set(nvidia ${LibTorch_PREFIX}/../nvidia)
# tools/setup replaces this directory when it installs more.
if(LibTorch_PREFIX MATCHES "/[.]deps/torch$")
  set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${LibTorch_PREFIX}/..)
endif()
find_path(Nccl_INCLUDE_DIR nccl.h PATHS ${nvidia}/nccl/include /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
find_path(Nccl_CUDA_INCLUDE_DIR cusparse.h PATHS ${nvidia}/cu13/include /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
if(TARGET LibTorch::cuda)
  set(Nccl_LIBTORCH LibTorch::cuda)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nccl REQUIRED_VARS Nccl_INCLUDE_DIR Nccl_CUDA_INCLUDE_DIR Nccl_LIBTORCH)

# LibTorch's wheel names the NCCL that it was built with.
if(Nccl_FOUND)
  file(STRINGS ${Nccl_INCLUDE_DIR}/nccl.h numbers REGEX "^#define NCCL_(MAJOR|MINOR) +[0-9]+")
  string(REGEX REPLACE "[^0-9;]+" "" numbers "${numbers}")
  string(REPLACE ";" "." Nccl_VERSION "${numbers}")
  file(GLOB metadata ${LibTorch_PREFIX}/../torch-${LibTorch_VERSION}*.dist-info/METADATA)
  if(metadata)
    file(STRINGS ${metadata} wheel REGEX "^Requires-Dist: nvidia-nccl-cu[0-9]+==" LIMIT_COUNT 1)
    if(wheel MATCHES "==([0-9]+[.][0-9]+)" AND NOT CMAKE_MATCH_1 STREQUAL Nccl_VERSION)
      message(STATUS "${Nccl_INCLUDE_DIR}/nccl.h has version ${Nccl_VERSION}, and LibTorch has ${CMAKE_MATCH_1}: the "
                     "plug-in for NCCL is compiled, but will refuse to run. `make run DEVICE=cuda` installs the header")
    endif()
  endif()
endif()

if(Nccl_FOUND AND NOT TARGET Nccl::headers)
  add_library(Nccl::headers INTERFACE IMPORTED)
  target_include_directories(Nccl::headers INTERFACE ${Nccl_INCLUDE_DIR} ${Nccl_CUDA_INCLUDE_DIR})
  target_compile_definitions(Nccl::headers INTERFACE USE_C10D_NCCL)
endif()
