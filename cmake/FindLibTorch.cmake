# Finds LibTorch without TorchConfig.cmake, which rejects a CUDA wheel without a CUDA toolkit.
#
# Searches, in this order:
#   LibTorch_ROOT, Torch_ROOT, Torch_DIR, CMAKE_PREFIX_PATH (variables or environment): the user's
#     choice, so a version outside the wanted range is an error;
#   LibTorch_INSTALLED: the one that Paceline was installed with, for which the same holds;
#   the package `torch` of Python_EXECUTABLE, which pip sets, or else of the active Python; it is
#     found but not imported;
#   LibTorch_FALLBACK: the directory into which tools/setup installs.
# The last two may exist for another purpose, so a version outside the range is skipped with a
# message. A library whose std::string has the ABI before C++11 is rejected or skipped in the same way: linking to
# it would end in undefined symbols. Nothing is cached, so a later configure sees a torch that has moved or changed.
#
# Sets LibTorch_FOUND, LibTorch_VERSION, LibTorch_PREFIX (the directory with include/ and lib/)
# and makes the targets LibTorch::torch and, with CUDA, LibTorch::cuda.

# Sets `out` to the version of the LibTorch in `prefix`, or to "" if there is none.
function(_libtorch_read_version prefix out)
  set(${out} "" PARENT_SCOPE)
  # Before 2.9 the second of these headers had the numbers.
  foreach(header torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT EXISTS ${prefix}/include/${header} OR NOT EXISTS ${prefix}/lib/libtorch_cpu.so)
      continue()
    endif()
    file(READ ${prefix}/include/${header} text)
    if(text MATCHES "TORCH_VERSION_MAJOR ([0-9]+).*TORCH_VERSION_MINOR ([0-9]+).*TORCH_VERSION_PATCH ([0-9]+)")
      set(${out} ${CMAKE_MATCH_1}.${CMAKE_MATCH_2}.${CMAKE_MATCH_3} PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# Sets `out` to whether the library has libstdc++'s C++11 ABI: its strings are std::__cxx11's.
function(_libtorch_has_cxx11_abi prefix out)
  file(STRINGS ${prefix}/lib/libc10.so names REGEX "_ZN3c10.*__cxx11" LIMIT_COUNT 1)
  if(names)
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to the directories that the user's variables may mean.
function(_libtorch_given_prefixes out)
  set(prefixes ${LibTorch_ROOT} $ENV{LibTorch_ROOT} ${Torch_ROOT} $ENV{Torch_ROOT})
  foreach(dir ${Torch_DIR} $ENV{Torch_DIR})
    list(APPEND prefixes ${dir}/../../..)  # <prefix>/share/cmake/Torch
  endforeach()
  string(REPLACE ":" ";" environment "$ENV{CMAKE_PREFIX_PATH}")
  foreach(dir ${CMAKE_PREFIX_PATH} ${environment})
    # A prefix, a site-packages directory, or torch.utils.cmake_prefix_path (<prefix>/share/cmake).
    list(APPEND prefixes ${dir} ${dir}/torch ${dir}/../..)
  endforeach()
  set(absolute)
  foreach(dir ${prefixes})
    get_filename_component(dir ${dir} ABSOLUTE)
    list(APPEND absolute ${dir})
  endforeach()
  set(${out} ${absolute} ${LibTorch_INSTALLED} PARENT_SCOPE)
endfunction()

function(_libtorch_python_prefix out)
  set(python python3)
  if(Python_EXECUTABLE)
    set(python ${Python_EXECUTABLE})
  endif()
  execute_process(
    COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    RESULT_VARIABLE result OUTPUT_VARIABLE dir ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT result EQUAL 0)
    set(dir "")
  endif()
  set(${out} ${dir} PARENT_SCOPE)
endfunction()

include(FindPackageHandleStandardArgs)
unset(LibTorch_PREFIX)
unset(LibTorch_VERSION)
set(_libtorch_reason "No LibTorch was found: pip install torch==2.15.*, set Torch_DIR or CMAKE_PREFIX_PATH to one, or, in a clone, run tools/setup, which installs it into .deps")

_libtorch_given_prefixes(_libtorch_given)
_libtorch_python_prefix(_libtorch_by_chance)
list(APPEND _libtorch_by_chance ${LibTorch_FALLBACK})
foreach(_libtorch_dir ${_libtorch_given} ${_libtorch_by_chance})
  get_filename_component(_libtorch_dir ${_libtorch_dir} ABSOLUTE)
  _libtorch_read_version(${_libtorch_dir} _libtorch_version)
  if(NOT _libtorch_version)
    continue()
  endif()
  find_package_check_version(${_libtorch_version} _libtorch_usable HANDLE_VERSION_RANGE)
  if(NOT _libtorch_usable AND NOT _libtorch_dir IN_LIST _libtorch_given)
    message(STATUS "Skipping LibTorch ${_libtorch_version} in ${_libtorch_dir}: "
                   "the wanted version is ${LibTorch_FIND_VERSION_COMPLETE}")
    continue()
  endif()
  _libtorch_has_cxx11_abi(${_libtorch_dir} _libtorch_cxx11)
  if(NOT _libtorch_cxx11 AND NOT _libtorch_dir IN_LIST _libtorch_given)
    message(STATUS "Skipping LibTorch ${_libtorch_version} in ${_libtorch_dir}: "
                   "it has the ABI before C++11")
    continue()
  endif()
  if(_libtorch_usable AND NOT _libtorch_cxx11)
    set(_libtorch_reason "${_libtorch_dir} has LibTorch ${_libtorch_version} with the ABI before C++11 (_GLIBCXX_USE_CXX11_ABI=0): name one with the C++11 ABI in LibTorch_ROOT, Torch_DIR or CMAKE_PREFIX_PATH")
    break()
  endif()
  set(LibTorch_PREFIX ${_libtorch_dir})
  set(LibTorch_VERSION ${_libtorch_version})
  set(_libtorch_reason "${_libtorch_dir} has LibTorch ${_libtorch_version}, but the wanted version is ${LibTorch_FIND_VERSION_COMPLETE}: name another one in LibTorch_ROOT, Torch_DIR or CMAKE_PREFIX_PATH")
  break()
endforeach()

find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_PREFIX
  VERSION_VAR LibTorch_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE "${_libtorch_reason}")

# A script (cmake -P) may check for LibTorch, but cannot have targets.
if(LibTorch_FOUND AND NOT TARGET LibTorch::torch AND NOT CMAKE_SCRIPT_MODE_FILE)
  add_library(LibTorch::c10 SHARED IMPORTED)
  set_target_properties(LibTorch::c10 PROPERTIES
    IMPORTED_LOCATION ${LibTorch_PREFIX}/lib/libc10.so)
  target_include_directories(LibTorch::c10 INTERFACE
    ${LibTorch_PREFIX}/include ${LibTorch_PREFIX}/include/torch/csrc/api/include)
  target_compile_features(LibTorch::c10 INTERFACE cxx_std_20)

  add_library(LibTorch::torch SHARED IMPORTED)
  set_target_properties(LibTorch::torch PROPERTIES
    IMPORTED_LOCATION ${LibTorch_PREFIX}/lib/libtorch_cpu.so)
  target_link_libraries(LibTorch::torch INTERFACE LibTorch::c10)

  # Only for what is loaded where CUDA is: it needs cuDNN, cuBLAS and more, which may be missing here.
  if(EXISTS ${LibTorch_PREFIX}/lib/libtorch_cuda.so)
    add_library(LibTorch::c10_cuda SHARED IMPORTED)
    set_target_properties(LibTorch::c10_cuda PROPERTIES
      IMPORTED_LOCATION ${LibTorch_PREFIX}/lib/libc10_cuda.so)
    add_library(LibTorch::cuda SHARED IMPORTED)
    set_target_properties(LibTorch::cuda PROPERTIES
      IMPORTED_LOCATION ${LibTorch_PREFIX}/lib/libtorch_cuda.so)
    target_link_options(LibTorch::cuda INTERFACE -Wl,--allow-shlib-undefined)
    target_link_libraries(LibTorch::cuda INTERFACE LibTorch::c10_cuda LibTorch::torch)
  endif()
endif()
