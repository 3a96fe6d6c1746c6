# Finds the LibTorch that this project is built with. tools/setup runs it as a script (cmake -P) to
# check for one.

cmake_minimum_required(VERSION 3.25)
list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
get_filename_component(LibTorch_FALLBACK ${CMAKE_CURRENT_LIST_DIR}/../.deps/torch ABSOLUTE)
# Headers and names change with minor versions. FindLibTorch.cmake checks the version, and that the
# library has the C++11 ABI, which wheels of older versions and builds of your own may lack.
set(LibTorch_RANGE 2.15...<2.16)
# Global: a project that adds this one as a subdirectory links the library, too.
find_package(LibTorch ${LibTorch_RANGE} REQUIRED GLOBAL)
