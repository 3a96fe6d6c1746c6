#include "drawing/save_svg.h"

#include <cerrno>
#include <fstream>
#include <system_error>

namespace paceline::drawing {

void save_svg(std::string_view svg, const std::filesystem::path& file) {
  errno = 0;
  std::ofstream stream(file, std::ios::binary);
  if (stream.write(svg.data(), static_cast<std::streamsize>(svg.size())).flush()) return;
  throw std::system_error(errno, std::generic_category(),
                          "cannot write the chart " + file.string());
}

}  // namespace paceline::drawing
