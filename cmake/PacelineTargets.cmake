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

# paceline_layer(NAME [NOT_IN_LIBRARY] SOURCES ... [LIBRARIES ...]): one folder as the OBJECT
# library paceline_NAME, and a part of the library. LIBRARIES may name layers and outside libraries;
# layers are not linked into each other, but all into the target that needs them (paceline_compose).
# Without LibTorch, layers that need it are left out.
function(paceline_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NOT_IN_LIBRARY" "" "SOURCES;LIBRARIES")
  if("LibTorch::torch" IN_LIST arg_LIBRARIES AND NOT PACELINE_TORCH)
    return()
  endif()
  if(NOT arg_NOT_IN_LIBRARY)
    set_property(GLOBAL APPEND PROPERTY PACELINE_PARTS ${name})
  endif()
  add_library(paceline_${name} OBJECT ${arg_SOURCES})
  # What the library exports carries PACELINE_API (paceline/api.h).
  set_target_properties(paceline_${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(paceline_${name} PUBLIC
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${PACELINE_GENERATED_INCLUDE_DIR}>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>)
  target_link_libraries(paceline_${name}
    PRIVATE $<BUILD_INTERFACE:paceline_options>
    PUBLIC Threads::Threads $<BUILD_INTERFACE:${arg_LIBRARIES}>)
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
