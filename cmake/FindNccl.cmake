# Finds what compiling against LibTorch's NCCL backend needs: the headers of NCCL and of CUDA, in a CUDA toolkit or in
# NVIDIA's packages for Python beside LibTorch, and a LibTorch with CUDA (LibTorch::cuda). Makes the target Nccl::headers,
# which also enables c10d's ProcessGroupNCCL.hpp. Nothing is linked to NCCL: libtorch_cuda.so is.

# Those beside LibTorch have the version that it was built with. Nothing is cached, so a later configure sees what has
# been installed since.
set(nvidia ${LibTorch_PREFIX}/../nvidia)
find_path(Nccl_INCLUDE_DIR nccl.h PATHS ${nvidia}/nccl/include /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
find_path(Nccl_CUDA_INCLUDE_DIR cusparse.h PATHS ${nvidia}/cu13/include /usr/local/cuda/include NO_DEFAULT_PATH NO_CACHE)
if(TARGET LibTorch::cuda)
  set(Nccl_LIBTORCH LibTorch::cuda)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Nccl REQUIRED_VARS Nccl_INCLUDE_DIR Nccl_CUDA_INCLUDE_DIR Nccl_LIBTORCH)

if(Nccl_FOUND AND NOT TARGET Nccl::headers)
  add_library(Nccl::headers INTERFACE IMPORTED)
  target_include_directories(Nccl::headers INTERFACE ${Nccl_INCLUDE_DIR} ${Nccl_CUDA_INCLUDE_DIR})
  target_compile_definitions(Nccl::headers INTERFACE USE_C10D_NCCL)
endif()
