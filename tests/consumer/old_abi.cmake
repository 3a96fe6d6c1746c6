# A LibTorch that the user names must be refused by name if its std::string has the ABI before C++11, or if its
# version is wrong, even if it is the active Python's.
#
#   cmake -D SOURCE_DIR=... -D WORK_DIR=... -P old_abi.cmake
file(REMOVE_RECURSE ${WORK_DIR})
file(WRITE ${WORK_DIR}/include/torch/headeronly/version.h
     "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 15\n#define TORCH_VERSION_PATCH 0\n")
file(WRITE ${WORK_DIR}/lib/libtorch_cpu.so "")

file(WRITE ${WORK_DIR}/python "#!/bin/sh\necho ${WORK_DIR}\n")
file(CHMOD ${WORK_DIR}/python PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)

# Expects cmake/LibTorch.cmake to give `code` and to say `text`, with this name in libc10.so.
function(expect variable name code text)
  file(WRITE ${WORK_DIR}/lib/libc10.so "${name}")
  execute_process(
    COMMAND ${CMAKE_COMMAND} -D ${variable}=${WORK_DIR} -D Python_EXECUTABLE=${WORK_DIR}/python
            -P ${SOURCE_DIR}/cmake/LibTorch.cmake
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT result EQUAL code OR NOT output MATCHES "${text}")
    message(FATAL_ERROR "expected ${code} and '${text}', got ${result}: ${output}")
  endif()
endfunction()

set(new_name _ZN3c105ErrorC1ENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE)
foreach(variable LibTorch_ROOT Torch_ROOT)
  expect(${variable} _ZN3c105ErrorC1ESs 1 "with the ABI before C")
  expect(${variable} ${new_name} 0 "Found LibTorch: ${WORK_DIR}")
endforeach()
file(WRITE ${WORK_DIR}/include/torch/headeronly/version.h
     "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 1\n#define TORCH_VERSION_PATCH 0\n")
expect(Torch_ROOT ${new_name} 1 "has LibTorch 2.1.0, but the wanted version")
