#pragma once

#include <filesystem>
#include <string>

namespace paceline::base {

// The plug-in `name`.so that was built with this library: in lib/paceline, where the shared library
// is in lib, and programs are in bin or libexec/paceline beside it. Empty if there is none.
std::filesystem::path plugin_path(const std::string& name);

}  // namespace paceline::base
