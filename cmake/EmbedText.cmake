# paceline_embed(TARGET CONSTANT FILE): makes FILE a std::string_view CONSTANT in namespace paceline,
# which TARGET includes as "FILE.h". Written when CMake runs, so that clang-tidy finds it in a tree
# that is not built; a change of FILE makes CMake run again.
function(paceline_embed target constant file)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} text)
  file(CONFIGURE OUTPUT ${file}.h @ONLY CONTENT [[
#pragma once
// From @file@.

#include <string_view>

namespace paceline {
inline constexpr std::string_view @constant@ = R"embedded(@text@)embedded";
}
]])
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
endfunction()
