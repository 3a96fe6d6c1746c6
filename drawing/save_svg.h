#pragma once

#include <filesystem>
#include <string_view>

namespace paceline::drawing {

// Replaces the file by a chart's SVG. Throws std::system_error that names the file.
void save_svg(std::string_view svg, const std::filesystem::path& file);

}  // namespace paceline::drawing
