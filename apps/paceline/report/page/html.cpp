#include "report/page/html.h"

#include <fmt/format.h>

#include <algorithm>

namespace paceline::report {

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      case '\'':
        result += "&#39;";
        break;
      default:
        // HTML has no control characters, not even as references.
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          result += "\uFFFD";
        } else {
          result += c;
        }
    }
  }
  return result;
}

std::string filled(std::string_view html, const std::map<std::string_view, std::string>& values) {
  std::string result;
  for (std::size_t at = html.find("{{"); at != html.npos; at = html.find("{{")) {
    const std::size_t end = html.find("}}", at);
    result += html.substr(0, at);
    result += values.at(html.substr(at + 2, end - at - 2));
    html.remove_prefix(end + 2);
  }
  return result += html;
}

std::string percent(double part) {
  return fmt::format("{:.3f}%", 100 * std::clamp(part, -1.0, 2.0));
}

}  // namespace paceline::report
