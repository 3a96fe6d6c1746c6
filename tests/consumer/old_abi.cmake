# A LibTorch of the right version, but with std::string of the ABI before C++11, must be refused by name.
#
#   cmake -D SOURCE_DIR=... -D WORK_DIR=... -P old_abi.cmake
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/include/torch/headeronly/version.h
     "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 15\n#define TORCH_VERSION_PATCH 0\n")
file(WRITE ${WORK_DIR}/lib/libtorch_cpu.so "")

# Expects cmake/LibTorch.cmake to give `code` and to say `text`, with this name in libc10.so.
function(expect name code text)
  file(WRITE ${WORK_DIR}/lib/libc10.so "${name}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -D LibTorch_ROOT=${WORK_DIR} -P ${SOURCE_DIR}/cmake/LibTorch.cmake
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL code OR NOT output MATCHES "${text}")
    message(FATAL_ERROR "expected ${code} and '${text}', got ${result}: ${output}")
  endif()
endfunction()

expect(_ZN3c105ErrorC1ESs 1 "with the ABI before C")
expect(_ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE 0 "Found LibTorch")
