# The compile options of every target, and the functions that make targets.

set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)

# Headers that CMake writes: paceline/version.h.
set(PACELINE_GENERATED_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
configure_file(${PROJECT_SOURCE_DIR}/cmake/version.h.in
               ${PACELINE_GENERATED_INCLUDE_DIR}/paceline/version.h @ONLY)

add_library(paceline_options INTERFACE)
target_compile_features(paceline_options INTERFACE cxx_std_20)
# Warnings are errors in CI only (PACELINE_WERROR in CMakePresets.json), since each compiler has others.
target_compile_options(paceline_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  if(CMAKE_UNITY_BUILD)
    # GCC collects garbage from 128 MB on, which takes 7 % of its time for large files that include torch/torch.h.
    target_compile_options(paceline_options INTERFACE --param=ggc-min-heapsize=2000000)
  endif()
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC 12 falsely reports overlapping copies in `"text" + std::string` (PR 105651).
    target_compile_options(paceline_options INTERFACE -Wno-restrict)
  else()
    # GCC 14 has false reports in LibTorch's headers, where std::vector<bool>::reserve and
    # std::optional's destructor are inlined (PR 56456 lists more).
    target_compile_options(paceline_options INTERFACE
      -Wno-array-bounds -Wno-stringop-overflow -Wno-maybe-uninitialized)
  endif()
endif()
if(PACELINE_SANITIZE)
  target_compile_options(paceline_options INTERFACE -fsanitize=${PACELINE_SANITIZE}
                         -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(paceline_options INTERFACE -fsanitize=${PACELINE_SANITIZE})
endif()

# paceline_precompiled_torch(TARGET): LibTorch's headers take half a minute to read, so they are compiled once, with the
# options of layers, for all targets that this is called with.
function(paceline_precompiled_torch target)
  if(NOT TARGET paceline_torch_header)
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/torch_header.cpp CONTENT "")
    add_library(paceline_torch_header OBJECT ${PROJECT_BINARY_DIR}/torch_header.cpp)
    target_link_libraries(paceline_torch_header PRIVATE paceline_options LibTorch::torch)
    _paceline_layer_options(paceline_torch_header)
    target_precompile_headers(paceline_torch_header PRIVATE
      <torch/torch.h> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
  endif()
  _paceline_layer_options(${target})
  target_precompile_headers(${target} REUSE_FROM paceline_torch_header)
endfunction()

# What the library exports carries PACELINE_API (paceline/api.h).
function(_paceline_layer_options target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE -fPIC)
endfunction()

# paceline_layer(NAME [NOT_IN_LIBRARY] [MACROS] SOURCES ... [LIBRARIES ...]): one folder as the OBJECT
# library paceline_NAME, and a part of the library. LIBRARIES may name layers and outside libraries;
# layers are not linked into each other, but all into the target that needs them (paceline_compose).
# Without LibTorch, layers that need it are left out. MACROS: the layer defines macros that LibTorch's headers read.
function(paceline_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NOT_IN_LIBRARY;MACROS" "" "SOURCES;LIBRARIES")
  if("LibTorch::torch" IN_LIST arg_LIBRARIES AND NOT PACELINE_TORCH)
    return()
  endif()
  if(NOT arg_NOT_IN_LIBRARY)
    set_property(GLOBAL APPEND PROPERTY PACELINE_PARTS ${name})
  endif()
  add_library(paceline_${name} OBJECT ${arg_SOURCES})
  target_include_directories(paceline_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${PACELINE_GENERATED_INCLUDE_DIR}>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  target_link_libraries(paceline_${name}
    PRIVATE $<BUILD_INTERFACE:paceline_options>
    PUBLIC Threads::Threads $<BUILD_INTERFACE:${arg_LIBRARIES}>)
  if("LibTorch::torch" IN_LIST arg_LIBRARIES AND NOT arg_MACROS)
    paceline_precompiled_torch(paceline_${name})
  else()
    _paceline_layer_options(paceline_${name})
  endif()
endfunction()

# paceline_compose(TARGET LAYER...): compiles these layers' objects into TARGET. Only
# targets that link an OBJECT library directly get its objects, so name every layer that is needed.
function(paceline_compose target)
  list(TRANSFORM ARGN PREPEND paceline_)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:paceline_options> ${ARGN})
endfunction()

# paceline_compose_all(TARGET): compiles all of the library's layers into TARGET, in place of linking
# paceline::paceline. For programs that use what the shared library hides: with both, they would have
# each layer's state twice.
function(paceline_compose_all target)
  get_property(parts GLOBAL PROPERTY PACELINE_PARTS)
  paceline_compose(${target} ${parts})
endfunction()
